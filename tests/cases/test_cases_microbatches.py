"""Cases 14 to 18 of what users were hurt by: micro-batches, shapes and evaluation."""

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe
from tests.members import intra_op_threads, mlp, over_all_ways, take_gradients, train_once


def assert_same_gradients(piped: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert piped.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(piped[name], gradient, rtol=1e-12, atol=1e-12)


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Scale(nn.Module):
    """Multiplies the rows of x by one row of factors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(double(6))

    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        x, factors = values
        return x * factors * self.weight


# Case 14. Of inputs with 4 rows and 1 row, peers train on 2 of the 4 and say nothing. Both sizes
# belong into the error, and one may be declared to be the same for all rows.
@over_all_ways
def test_case_14_sizes_that_disagree_are_refused_or_declared(face, schedule, checkpoint):
    torch.manual_seed(0)
    module = nn.Sequential(Scale(), nn.Linear(6, 6)).double()
    ways = {"chunks": 2, "schedule": schedule, "checkpoint": checkpoint}
    x, y, factors = double(4, 6), double(4, 6), double(1, 6).requires_grad_()
    with pytest.raises(ValueError, match=r"4 rows .* 1\b"):
        train_once(GPipe(module, 2, **ways), face, (x, factors), y, nn.MSELoss())
    assert take_gradients(module)["0.weight"] is None

    model = GPipe(module, 2, split=(0, None), **ways)
    train_once(model, face, (x, factors), y, nn.MSELoss())
    piped, of_factors = take_gradients(model), factors.grad
    factors.grad = None
    train_once(module, "backward", (x, factors), y, nn.MSELoss())
    assert_same_gradients(piped, take_gradients(module))
    torch.testing.assert_close(of_factors, factors.grad, rtol=1e-12, atol=1e-12)


class Positions(nn.Module):
    """Adds positions that come with the batch along dimension 1, where the mask allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, values: dict[str, Tensor]) -> Tensor:
        return self.linear(values["x"] + (values["pos"] * values["mask"]).T)


# Case 14, the other declaration: a tensor whose rows lie along another dimension.
@pytest.mark.parametrize("num_rows", [2, 5, 6])
@over_all_ways
def test_case_14_rows_may_lie_along_another_dimension(face, schedule, checkpoint, num_rows):
    torch.manual_seed(0)
    module = nn.Sequential(Positions(), nn.Tanh(), nn.Linear(6, 6)).double()
    split = {"x": 0, "pos": 1, "mask": None}
    model = GPipe(module, 3, chunks=4, split=split, schedule=schedule, checkpoint=checkpoint)
    values = {
        "x": double(num_rows, 6),
        "pos": double(6, num_rows).requires_grad_(),
        "mask": torch.tensor([[True], [False]] * 3),
    }
    y = double(num_rows, 6)
    train_once(model, face, values, y, nn.MSELoss())
    piped, of_positions = take_gradients(model), values["pos"].grad
    values["pos"].grad = None
    train_once(module, "backward", values, y, nn.MSELoss())
    assert_same_gradients(piped, take_gradients(module))
    torch.testing.assert_close(of_positions, values["pos"].grad, rtol=1e-12, atol=1e-12)


class Recurrent(nn.Module):
    """A GRU that passes its sequence on."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


# Case 15. Buffers were made for the first shape, so later sequences were cut or ran into an old
# one's remains.
@over_all_ways
def test_case_15_lengths_change_from_step_to_step(face, schedule, checkpoint):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), Recurrent(), nn.Linear(6, 6)).double()
    model = GPipe(module, 3, chunks=3, schedule=schedule, checkpoint=checkpoint)
    for length, num_rows in ((4, 8), (7, 8), (3, 8), (7, 4), (4, 4)):
        x, y = double(num_rows, length, 6), double(num_rows, length, 6)
        loss = train_once(model, face, x, y, nn.MSELoss())
        piped = take_gradients(model)
        plain_loss = train_once(module, "backward", x, y, nn.MSELoss())
        torch.testing.assert_close(loss, plain_loss, rtol=1e-12, atol=0)
        assert_same_gradients(piped, take_gradients(module))


# Case 16. An evaluation between two steps, with another number of rows, left its sizes, statistics
# or random numbers behind, and training went another way.
@pytest.mark.parametrize("deferred", [False, True])
@over_all_ways
def test_case_16_an_evaluation_leaves_no_trace(face, schedule, checkpoint, deferred):
    def trained(evaluates: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        layers = (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6))
        model = GPipe(
            nn.Sequential(*layers), [1, 2, 1], chunks=3, schedule=schedule,
            checkpoint=checkpoint, deferred_batch_norm=deferred,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = torch.randn(3, 2, 8, 6)
        for x, y in batches:
            train_once(model, face, x, y, nn.MSELoss())
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                model.eval()
                for num_rows in (5, 1, 0):
                    model(torch.ones(num_rows, 6))
                model.step(torch.ones(2, 6), torch.ones(2, 6), nn.MSELoss())
                model.train()
        return model.state_dict()

    with intra_op_threads(1):
        without, evaluated = trained(evaluates=False), trained(evaluates=True)
    for name, value in without.items():
        assert torch.equal(evaluated[name], value), name


# Case 17. Outputs left the pipe in the schedule's order and met the targets in the loader's. Row i
# is i, and so is its target; a pair that does not belong together also gives another Σx².
@pytest.mark.parametrize("chunks", [1, 3, 7])
@over_all_ways
def test_case_17_targets_meet_the_outputs_of_their_own_rows(face, schedule, checkpoint, chunks):
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        assert torch.equal(output, target)
        return (output * target).sum()

    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity(), nn.Identity())
    nn.init.ones_(module[0].weight)
    model = GPipe(module, 3, chunks, schedule=schedule, checkpoint=checkpoint)
    x = torch.arange(7.0).unsqueeze(1)
    if face == "step":
        result = model.step(x, x, loss_fn, loss_reduction="sum", return_output=True)
        assert torch.equal(result.output, x)
        assert result.loss == 91
    else:
        train_once(model, face, x, x, loss_fn)
    assert model[0].weight.grad == 91


# Case 18. With fewer rows than `chunks`, or fewer micro-batches than stages, a stage waited for a
# micro-batch that nobody would send.
@pytest.mark.parametrize("num_rows", [1, 2, 3])
@over_all_ways
def test_case_18_nothing_waits_for_micro_batches_that_are_not(face, schedule, checkpoint, num_rows):
    module = mlp().double()
    model = GPipe(module, 4, chunks=8, schedule=schedule, checkpoint=checkpoint)
    x, y = double(num_rows, 6), double(num_rows, 6)
    if face == "step":
        timeline = model.step(x, y, nn.MSELoss()).timeline
        assert {event.action.microbatch for event in timeline.events} == set(range(num_rows))
    else:
        train_once(model, face, x, y, nn.MSELoss())
    piped = take_gradients(model)
    train_once(module, "backward", x, y, nn.MSELoss())
    assert_same_gradients(piped, take_gradients(module))
