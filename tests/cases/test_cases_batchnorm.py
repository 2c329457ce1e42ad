"""Cases 19 and 20 of what users were hurt by: running statistics of BatchNorm."""

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe
from tests.members import FACES, SCHEDULES, mlp, over_all_ways, train_once


def around(norm: nn.Module) -> nn.Sequential:
    """The norm between layers that are trained, and the first of which changes nothing."""
    module = nn.Sequential(nn.Linear(1, 1), norm, nn.Linear(1, 1))
    nn.init.ones_(module[0].weight)
    nn.init.zeros_(module[0].bias)
    return module


def output_sum(output: Tensor, _: object) -> Tensor:
    return output.square().sum()


def train(model: GPipe, face: str, x: Tensor) -> None:
    if face == "step":
        model.step(x, x, output_sum, loss_reduction="sum")
    else:
        train_once(model, face, x, x, output_sum)


def statistics(model: nn.Module) -> list[float]:
    """Running mean, running variance and the number of batches."""
    state = model.state_dict()
    names = ("running_mean", "running_var", "num_batches_tracked")
    return [state[f"1.{name}"].item() for name in names]


# Case 19. Each slice counted as a batch, so that momentum 0.1 weighed 0.19, and each recompute
# counted again. Of 1, 2, 3, 4 the mean is 2.5 and the unbiased variance 5/3: 0.1 · 2.5 = 0.25, and
# 0.9 + 0.1 · 5/3 = 1.066667, as without slices.
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@over_all_ways
def test_case_19_a_mini_batch_counts_once(face, schedule, checkpoint, num_stages):
    model = GPipe(
        around(nn.BatchNorm1d(1, momentum=0.1)), num_stages, chunks=2, schedule=schedule,
        checkpoint=checkpoint, deferred_batch_norm=True,
    )  # fmt: skip
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    train(model, face, x)
    assert statistics(model) == pytest.approx([0.25, 1.066667, 1], abs=1e-6)

    plain = around(nn.BatchNorm1d(1, momentum=0.1))
    plain(x)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert statistics(model) == pytest.approx(statistics(plain), abs=1e-6)


# Case 20. A layer that counted its calls to learn where the mini-batch ends waited for a fourth
# slice, which three rows do not have, and gave the statistics of these rows to the next mini-batch.
# (Each row has two positions, since torch's BatchNorm refuses to train on a single value.)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@over_all_ways
def test_case_20_a_small_mini_batch_leaks_nothing(face, schedule, checkpoint, num_stages):
    norm = nn.Sequential(nn.Unflatten(1, (1, 2)), nn.BatchNorm1d(1, momentum=0.1), nn.Flatten())
    model = GPipe(
        nn.Sequential(*norm, nn.Linear(2, 2)), num_stages, chunks=4, schedule=schedule,
        checkpoint=checkpoint, deferred_batch_norm=True,
    )  # fmt: skip
    train(model, face, torch.full((3, 2), 5.0))
    assert statistics(model) == pytest.approx([0.5, 0.9, 1])
    train(model, face, torch.zeros(4, 2))
    assert statistics(model) == pytest.approx([0.45, 0.81, 2])


# The same cause, met from the other side: what a failed mini-batch has seen must not stay either.
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("face", FACES)
def test_case_20_a_failed_mini_batch_leaks_nothing(face, schedule):
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not x.isnan().any(), "as asked for"
            return x

    module = nn.Sequential(Fails(), nn.BatchNorm1d(6), *mlp(3), Fails())
    model = GPipe(module, 3, chunks=2, schedule=schedule, deferred_batch_norm=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    broken = torch.ones(4, 6)
    broken[3] = torch.nan
    with pytest.raises(AssertionError, match="as asked for"):
        train(model, face, broken)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    train(model, face, torch.full((4, 6), 5.0))
    assert torch.allclose(model.state_dict()["1.running_mean"], torch.full((6,), 0.5))
