"""What shapes alone tell."""

import pytest
import torch
from torch import Tensor, nn

from gpipe.models import transformer
from gpipe.profiling import profile_memory, profile_meta, shapes


def test_operations_of_matrix_products():
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    costs = profile_meta(module, torch.rand(10, 8))
    assert costs.forward_flops_per_row == (2 * 8 * 16, 0, 2 * 16 * 4)
    # The first layer's input needs no gradient.
    assert costs.backward_flops_per_row == (2 * 8 * 16, 0, 2 * 2 * 16 * 4)
    assert costs.forward_s == (0, 0, 0)


def test_frozen_layers_have_no_operations_for_their_weights():
    frozen = nn.Linear(8, 8).requires_grad_(False)
    costs = profile_meta(nn.Sequential(nn.Linear(8, 8), frozen), torch.rand(4, 8))
    assert costs.backward_flops_per_row == (128, 128)


def test_operations_of_attention():
    module = transformer(1, 32, 4, 50)
    num_tokens = 24
    costs = profile_meta(module, torch.zeros(4, num_tokens, dtype=torch.int64), device="cpu")
    products = 2 * num_tokens * (4 * 32 * 32 + 2 * 32 * 128)
    attention = 2 * 2 * num_tokens**2 * 32
    assert costs.forward_flops_per_row == (0, products + attention, 2 * num_tokens * 32 * 50)
    # The fused kernel computes its scores again.
    assert costs.backward_flops_per_row[1] == 2 * products + attention * 5 / 2


def test_convolutions_and_parametrizations():
    module = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1)), nn.Flatten()
    )
    costs = profile_meta(module, torch.rand(4, 3, 8, 8))
    assert costs.forward_flops_per_row == (2 * 27 * 4 * 64, 0)


@pytest.mark.parametrize("of_model", ["cpu", "meta"])
@pytest.mark.parametrize("of_sample", ["cpu", "meta"])
def test_model_and_sample_may_be_anywhere(of_model, of_sample):
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())

    with torch.device(of_model):
        module = build()
    sample = torch.rand(4, 3, 8, 8)
    costs = profile_meta(module, sample.to(of_sample), device="cpu")
    assert costs.memory == profile_memory(build(), sample).memory
    assert costs.device == "cpu"
    assert all(parameter.device.type == of_model for parameter in module.parameters())


class Counted(nn.Linear):
    """A user's own layer."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        Counted.calls += 1
        return super().forward(input)


def visits(module: nn.Sequential, sample: Tensor, monkeypatch) -> int:
    """How many layers are really looked at."""
    measured = []
    flops = shapes._flops
    monkeypatch.setattr(shapes, "_flops", lambda trials: measured.append(1) or flops(trials))
    profile_meta(module, sample)
    return len(measured)


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("second", "num_visits"),
    [
        (lambda: nn.Linear(6, 6), 1),
        (lambda: nn.Linear(6, 6, bias=False), 2),
        (lambda: nn.Linear(6, 6).requires_grad_(False), 2),
        (lambda: nn.Linear(6, 6).eval(), 2),
        (lambda: nn.Linear(6, 6, dtype=torch.float64).float(), 1),
        (lambda: hooked(nn.Linear(6, 6)), 2),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), 2),
    ],
)
def test_equal_layers_of_torch_are_looked_at_once(second, num_visits, monkeypatch):
    module = nn.Sequential(nn.Linear(6, 6), second())
    assert visits(module, torch.rand(4, 6, requires_grad=True), monkeypatch) == num_visits


def test_other_inputs_are_looked_at_again(monkeypatch):
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    assert visits(module, torch.rand(4, 6), monkeypatch) == 2  # the first needs no gradient


def test_what_a_hook_of_all_modules_does_is_not_known(monkeypatch):
    module, sample = nn.Sequential(nn.Tanh(), nn.Tanh()), torch.rand(4, 6)
    assert visits(module, sample, monkeypatch) == 1
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert visits(module, sample, monkeypatch) == 2
    finally:
        hook.remove()


def test_layers_of_users_are_looked_at_each_time(monkeypatch):
    # What their forward does may follow from anything, here from how often it was called.
    module = nn.Sequential(*(Counted(6, 6) for _ in range(3)))
    assert visits(module, torch.rand(4, 6), monkeypatch) == 3


def test_remembered_layers_give_the_same_costs_as_visited_ones(monkeypatch):
    module = transformer(5, 32, 4, 50)
    sample = torch.zeros(4, 24, dtype=torch.int64)
    remembered = profile_meta(module, sample)
    monkeypatch.setattr(shapes, "likeness", lambda place: None)
    assert profile_meta(module, sample) == remembered


def test_the_blocks_of_a_transformer_are_looked_at_once(monkeypatch):
    with torch.device("meta"):
        module = transformer(103, 2048, 16, 32000)
        sample = torch.zeros(32, 1024, dtype=torch.int64)
    assert visits(module, sample, monkeypatch) == 3


def test_nothing_is_allocated():
    module = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 8))
    costs = profile_meta(module, torch.zeros(10**9, 1024, device="meta"))  # 4 TB
    assert costs.saved_bytes_per_row == (4096, 4096, 0)
