"""Laws 1, 2 and 4 for layers that begin only later to do what needs care."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.errors import GpipeError
from tests.laws.delivery import assert_same_gradients
from tests.members import over_all_ways, take_gradients, train_once

BEGIN, CHUNKS = 3, 3  # the mini-batch in which it begins


class InPlace(nn.Module):
    """Doubles; from some day on, in place."""

    begun = False

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if self.begun else x * 2

    def begin(self) -> None:
        self.begun = True


class Counts(nn.Module):
    """Multiplies by a buffer; from some day on, it grows with each forward."""

    begun = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.begun:
            self.factor += 1
        return x * self.factor.clone()

    def begin(self) -> None:
        self.begun = True


class Unfreezes(nn.Module):
    """Has a batch norm inside, whose statistics are frozen up to some day."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).tanh()

    def begin(self) -> None:
        self.norm.train()


LATER: dict[str, Callable[[], nn.Module]] = {
    "writes into its input": InPlace,
    "changes a buffer": Counts,
    "unfreezes a batch norm inside": Unfreezes,
}


def square_sum(output: Tensor, _: object) -> Tensor:
    return output.square().sum()


def build(name: str, position: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Linear(6, 6)]
    layers.insert(position, LATER[name]())
    return nn.Sequential(*layers).double()


# What a stage does is learnt in its first mini-batches, so that nothing is paid for what it does
# not do. (Dropout whose rate is raised from 0, observers that are switched on, statistics that are
# unfrozen: layers change.) What begins later is seen: the mini-batch is right, or it is refused and
# leaves no gradient, and from then on all are right.
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("name", LATER)
@over_all_ways
def test_what_begins_later_is_right_or_refused_once(face, schedule, checkpoint, name, position):
    module, plain = build(name, position), build(name, position)
    model = GPipe(module, 3, CHUNKS, schedule=schedule, checkpoint=checkpoint)
    num_refused = 0
    for index in range(BEGIN + 3):
        if index == BEGIN:
            module[position].begin()
            plain[position].begin()
        x = torch.randn(7, 6, dtype=torch.float64)
        try:
            if face == "step":
                model.step(x.clone(), x, square_sum, loss_reduction="sum")
            else:
                train_once(model, face, x.clone(), x, square_sum)
        except (RuntimeError, GpipeError):
            assert index == BEGIN
            num_refused += 1
            assert all(gradient is None for gradient in take_gradients(model).values())
            plain.load_state_dict(module.state_dict())
            continue
        for x_slice in x.tensor_split(CHUNKS):
            square_sum(plain(x_slice.clone()), None).backward()
        assert_same_gradients(take_gradients(model), take_gradients(plain))
        for mine, other in zip(module.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    assert num_refused <= 1


# Of one row, the strides of a gradient tell nothing about those of many rows.
@over_all_ways
def test_strides_of_gradients_are_not_learnt_from_one_row(face, schedule, checkpoint):
    seen = []

    class SeesStrides(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.register_hook(lambda gradient: seen.append(gradient.stride()))
            return y

    class Across(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (self.weight @ x.mT.contiguous()).mT

    module = nn.Sequential(SeesStrides(6, 6), Across(6, 6))
    train_once(module, "backward", torch.ones(7, 6), torch.ones(7, 6), nn.MSELoss())
    expected = seen.pop()
    assert expected == (1, 7)
    model = GPipe(module, 2, 1, schedule=schedule, checkpoint=checkpoint)
    for num_rows in (1, 1, 1, 7):
        seen.clear()
        train_once(model, face, torch.ones(num_rows, 6), torch.ones(num_rows, 6), nn.MSELoss())
    assert seen == [expected]
