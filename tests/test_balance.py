from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gpipe import balance
from gpipe.balance import (
    balance_by_flops,
    balance_by_memory,
    balance_by_parameters,
    balance_by_time,
    balance_costs,
    layer_bytes,
)
from gpipe.errors import PlanError
from gpipe.models import transformer
from tests.plan.members import layer_costs

SAMPLE = torch.rand(4, 8)


def wide_and_narrow() -> nn.Sequential:
    """One layer as large as the three others."""
    return nn.Sequential(
        nn.Linear(8, 240), nn.Linear(240, 8), nn.Linear(8, 240), nn.Linear(240, 8), nn.Linear(8, 8)
    )


def test_all_balancers_are_here():
    assert balance_costs([7, 2, 2, 2, 7], 3) == [1, 3, 1]
    assert balance_by_parameters(2, wide_and_narrow()) == [2, 3]


def test_by_time_counts_forward_and_backward(monkeypatch):
    seen = {}

    def profile(module, sample, **options):
        seen.update(options, sample=sample)
        return replace(layer_costs(), forward_s=(1, 1, 1, 3), backward_s=(1, 2, 3, 9))

    monkeypatch.setattr(balance, "profile", profile)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    threads = torch.get_num_threads()
    assert balance_by_time(2, module, SAMPLE, time_budget_s=3.0) == [3, 1]
    assert seen == {"time_budget_s": 3.0, "sample": SAMPLE, "num_threads": max(1, threads // 2)}
    balance_by_time(2, module, SAMPLE, num_threads=5)
    assert seen["num_threads"] == 5


def test_by_time_shares_the_threads_between_workers(monkeypatch):
    seen = []

    def profile(module, sample, **options):
        seen.append(options["num_threads"])
        return layer_costs()

    monkeypatch.setattr(balance, "profile", profile)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    balance_by_time(4, module, SAMPLE, num_workers=2)
    balance_by_time(4, module, SAMPLE)
    assert seen == [4, 2]
    with pytest.raises(ValueError, match="`num_workers` is 0"):
        balance_by_time(4, module, SAMPLE, num_workers=0)


def test_by_time_measures():
    class Busy(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.times = times

        def forward(self, input: Tensor) -> Tensor:
            for _ in range(self.times):
                input = input.sin()
            return input

    # 2000 operations against 6: no noise turns that round.
    module = nn.Sequential(*(Busy(1) for _ in range(6)), Busy(2000))
    assert balance_by_time(2, module, SAMPLE, time_budget_s=0.0) == [6, 1]


class Saves(nn.Module):
    """Saves 100 tensors of 8 columns."""

    def forward(self, input: Tensor) -> Tensor:
        output = input[:, :8]
        for _ in range(100):
            output = output.tanh()
        return output


def test_by_memory_counts_activations_parameters_and_the_optimizer():
    module = nn.Sequential(nn.Linear(8, 500), Saves(), Saves(), Saves())
    sample = torch.rand(16, 8)  # 51,200 bytes in each `Saves`, 18,000 in the Linear
    assert balance_by_memory(2, module, sample, optimizer_copies=0) == [2, 2]
    assert balance_by_memory(2, module, sample) == [2, 2]
    assert balance_by_memory(2, module, sample, optimizer_copies=20) == [1, 3]


def test_by_memory_leaves_out_gradients_of_what_is_frozen():
    layers = [nn.Linear(64, 64) for _ in range(6)]
    for layer in layers[:3]:
        layer.requires_grad_(False)
    sample = torch.rand(1, 64)
    assert balance_by_memory(2, nn.Sequential(*layers), sample) == [4, 2]
    assert balance_by_parameters(2, nn.Sequential(*layers)) == [3, 3]


def test_by_memory_on_the_meta_device():
    with torch.device("meta"):
        module = transformer(6, 64, 4, 50)
        sample = torch.zeros(4, 16, dtype=torch.int64)
    real = transformer(6, 64, 4, 50)
    expected = balance_by_memory(3, real, torch.zeros(4, 16, dtype=torch.int64), device="cpu")
    assert balance_by_memory(3, module, sample, device="cpu") == expected


def test_by_flops():
    # By operations the convolutions weigh most, by parameters the first linear layer.
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Flatten(),
        nn.Linear(8 * 16 * 16, 10),
        nn.Linear(10, 10),
    )
    sample = torch.rand(4, 3, 16, 16)
    assert balance_by_flops(2, module, sample) == [1, 4]
    assert balance_by_parameters(2, module) == [3, 2]


@pytest.mark.parametrize("by", [balance_by_time, balance_by_memory, balance_by_flops])
def test_refuses_before_measuring(by):
    class Untouched(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            raise AssertionError("it was run")

    module = nn.Sequential(Untouched(), Untouched())
    with pytest.raises(PlanError, match="2 layers cannot fill 3 stages"):
        by(3, module, SAMPLE)
    with pytest.raises(ValueError, match="`num_stages` is 0"):
        by(0, module, SAMPLE)
    with pytest.raises(TypeError, match=r"not an nn\.Sequential"):
        by(1, Untouched(), SAMPLE)


def test_by_memory_counts_the_copies_of_autocast():
    costs = replace(layer_costs(parameter_bytes=[100.0] * 4), cast_bytes=(50, 0, 0, 0))
    assert layer_bytes(costs, 2.0) == [450 + 20, 400 + 20, 400 + 20, 400 + 20]


def test_by_flops_does_not_mind_a_workspace():
    class First(nn.LSTM):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)[0]

    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), First(8, 8))
    assert balance_by_flops(2, module, torch.rand(4, 3, 8), device="cpu") == [2, 1]
