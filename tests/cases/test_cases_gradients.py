"""Cases 1 to 7 of what users were hurt by: gradients and losses."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gpipe import GPipe, clip_grad_norm_
from tests.members import (
    CHECKPOINT_MODES,
    SCHEDULES,
    mlp,
    over_all_ways,
    take_gradients,
    train_once,
)


def chain(*weights: float) -> nn.Sequential:
    """Layers that multiply by one number each."""
    layers = [nn.Linear(1, 1, bias=False) for _ in weights]
    for layer, weight in zip(layers, weights, strict=True):
        nn.init.constant_(layer.weight, weight)
    return nn.Sequential(*layers)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def output_mean(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def output_sum(output: Tensor, _: Tensor) -> Tensor:
    return output.sum()


def assert_same_gradients(
    piped: dict[str, Tensor | None], plain: dict[str, Tensor | None], limit: float = 1e-6
) -> None:
    assert piped.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(piped[name], gradient, rtol=limit, atol=limit)


# Case 1. The scale of the gradients hung on the number of micro-batches: sums came out divided by
# it, means multiplied. y = 6x, x = 1, 2, 3, 4, target 0: the sum of squares is 1080, its mean 270;
# the gradient of the first weight is 2·6·3·Σx² = 1080, that of the second 2·6·2·Σx² = 720.
@pytest.mark.parametrize(("reduction", "share"), [("sum", 1.0), ("mean", 0.25)])
@over_all_ways
def test_case_1_gradients_do_not_scale_with_the_chunks(
    face, schedule, checkpoint, reduction, share
):
    loss_fn = nn.MSELoss(reduction=reduction)
    x, y = column(1, 2, 3, 4), torch.zeros(4, 1)
    for num_stages, chunks in product((1, 2), (1, 2, 4)):
        model = GPipe(chain(2, 3), num_stages, chunks, schedule=schedule, checkpoint=checkpoint)
        if face == "step":
            loss = model.step(x, y, loss_fn, loss_reduction=reduction).loss
        else:
            loss = train_once(model, face, x, y, loss_fn)
        assert loss.item() == pytest.approx(1080 * share)
        assert model[0].weight.grad.item() == pytest.approx(1080 * share)
        assert model[1].weight.grad.item() == pytest.approx(720 * share)


# Case 2. The second of two mini-batches rescaled what the first had left in `.grad`; the norm was
# 1.25 times that of one instead of twice. Doubling is exact in floating point, so bits must agree.
@over_all_ways
def test_case_2_two_mini_batches_give_exactly_twice(face, schedule, checkpoint):
    model = GPipe(mlp(), 3, chunks=4, schedule=schedule, checkpoint=checkpoint)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    train_once(model, face, x, y, nn.MSELoss())
    once = [parameter.grad.clone() for parameter in model.parameters()]
    norm = clip_grad_norm_(model, float("inf"))

    train_once(model, face, x, y, nn.MSELoss())
    assert clip_grad_norm_(model, float("inf")) == 2 * norm
    for parameter, gradient in zip(model.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, 2 * gradient)
        parameter.grad = torch.full_like(parameter, 7.0)  # what the user put there is added to

    train_once(model, face, x, y, nn.MSELoss())
    for parameter, gradient in zip(model.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, 7.0 + gradient)


def logits_model(schedule: str = "1f1b", checkpoint: str = "never") -> GPipe:
    """Passes logits through two layers that change nothing, and are trained."""
    layers = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    for layer in layers:
        nn.init.eye_(layer.weight)
    return GPipe(nn.Sequential(*layers), [1, 1], chunks=2, schedule=schedule, checkpoint=checkpoint)


def sum_and_weight(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(output, target, reduction="sum"), (target != -100).sum()


# Case 3. The mean of the micro-batches' means is 0.410038, since ignored targets are not evenly
# spread. A micro-batch in which all are ignored must give 0, where torch's own mean is 0/0.
@pytest.mark.parametrize(
    ("targets", "expected"),
    [([0, -100, 1, 1], 0.504407), ([-100, -100, 1, 1], 0.693147), ([0, 1, -100, -100], 0.410038)],
)
@pytest.mark.parametrize("declared", ["torch's own", "a pair"])
@over_all_ways
def test_case_3_ignored_targets_do_not_count(
    face, schedule, checkpoint, declared, targets, expected
):
    logits = torch.tensor([[2.0, 0], [0, 0], [0, 0], [0, 0]], requires_grad=True)
    target = torch.tensor(targets)
    model = logits_model(schedule, checkpoint)
    if face == "backward":
        loss = train_once(model, face, logits, target, nn.CrossEntropyLoss())
    elif declared == "a pair":
        loss = model.step(logits, target, sum_and_weight, loss_reduction="weighted").loss
    else:
        loss = model.step(logits, target, nn.CrossEntropyLoss()).loss
    piped, of_logits = take_gradients(model), logits.grad.clone()

    logits.grad = None
    plain = nn.Sequential(*model)
    plain_loss = cross_entropy(plain(logits), target)
    plain_loss.backward()
    assert loss.item() == pytest.approx(plain_loss.item(), abs=1e-6)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert_same_gradients(piped, take_gradients(plain))
    torch.testing.assert_close(of_logits, logits.grad)


# Case 4. Uneven slices counted alike: 1, 2, 3 and 4, 5 have the means 2 and 4.5, and 3.25 was
# shown. The mean of all is 3, and so is the gradient of a weight of 1.
@over_all_ways
def test_case_4_an_uneven_slice_counts_by_its_rows(face, schedule, checkpoint):
    model = GPipe(chain(1, 1), 2, chunks=2, schedule=schedule, checkpoint=checkpoint)
    x = column(1, 2, 3, 4, 5)
    assert train_once(model, face, x, x, output_mean).item() == 3.0
    assert [parameter.grad.item() for parameter in model.parameters()] == [3.0, 3.0]


# The same, batch after batch with one model: the last of an epoch is smaller, even than `chunks`.
@over_all_ways
def test_case_4_every_batch_size_equals_the_plain_model(face, schedule, checkpoint):
    module = mlp().double()
    model = GPipe(module, 3, chunks=4, schedule=schedule, checkpoint=checkpoint)
    for num_rows in (5, 1, 3, 8):
        x, y = torch.randn(2, num_rows, 6, dtype=torch.float64)
        loss = train_once(model, face, x, y, nn.MSELoss())
        piped = take_gradients(model)
        plain_loss = train_once(module, "backward", x, y, nn.MSELoss())
        torch.testing.assert_close(loss, plain_loss, rtol=1e-12, atol=0)
        assert_same_gradients(piped, take_gradients(module), limit=1e-12)


# Case 5, as far as one process goes. Gradients that arrive once per micro-batch let the replicas
# exchange half-finished sums: DistributedDataParallel counts on one gradient per parameter.
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_case_5_data_parallel_around_a_pipeline(one_rank_group, checkpoint):
    module = mlp()
    replica = DistributedDataParallel(GPipe(module, 3, chunks=4, checkpoint=checkpoint))
    for _ in range(2):
        x, y = torch.randn(2, 7, 6)
        train_once(replica, "backward", x, y, nn.MSELoss())
        piped = take_gradients(replica.module)
        train_once(module, "backward", x, y, nn.MSELoss())
        assert_same_gradients(piped, take_gradients(module))


@pytest.fixture
def one_rank_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


# Case 6. Clipping by stage gave gradients 1 and 1: each was scaled by its own norm. Of y = 4·3·x,
# x = 1, the gradients are 3 and 4, so the norm is 5.
@over_all_ways
def test_case_6_the_norm_is_that_of_all_stages(face, schedule, checkpoint):
    model = GPipe(chain(4, 3), 2, schedule=schedule, checkpoint=checkpoint)
    train_once(model, face, column(1), column(1), output_sum)
    assert [parameter.grad.item() for parameter in model.parameters()] == [3.0, 4.0]
    assert clip_grad_norm_(model, 1.0).item() == 5.0
    clipped = [parameter.grad.item() for parameter in model.parameters()]
    assert clipped == pytest.approx([0.6, 0.8], rel=1e-5)


class HalfScale(nn.Module):
    """Multiplies by a weight in half precision, whose gradients overflow at 65520."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, x: Tensor) -> Tensor:
        return (x.half() * self.weight.half()).float()


# Case 7, what `step` gives to it: gradients that are scaled, a loss that is not.
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_case_7_the_loss_scale_is_in_the_gradients_only(schedule, checkpoint):
    model = GPipe(chain(4, 3), 2, chunks=2, schedule=schedule, checkpoint=checkpoint)
    x = column(1, 3)
    result = model.step(x, x, output_mean, loss_scale=1024.0)
    assert result.loss.item() == 24.0
    assert [parameter.grad.item() for parameter in model.parameters()] == [6 * 1024.0, 8 * 1024.0]


# Case 7. One stage overflowed, and the others stepped: the model was torn. Here the overflow of
# stage 0 arrives at the caller, whose scaler skips the step of all and halves the scale once.
@over_all_ways
def test_case_7_one_overflow_stops_the_step_of_all_stages(face, schedule, checkpoint):
    module = nn.Sequential(HalfScale(4.0), *chain(3.0))
    model = GPipe(module, 2, chunks=2, schedule=schedule, checkpoint=checkpoint)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    x = column(1, 1)

    def attempt() -> float:
        optimizer.zero_grad()
        if face == "step":
            scale = scaler.scale(torch.ones(())).item()
            loss = model.step(x, x, output_mean, loss_scale=scale).loss
        else:
            loss = model(x).mean()
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    assert attempt() == 12.0
    assert model[0].weight.grad.isinf().all()
    assert model[1].weight.grad.isfinite().all()
    assert [parameter.item() for parameter in model.parameters()] == [4.0, 3.0]
    assert scaler.get_scale() == 32768.0

    scaler.update(1024.0)
    assert attempt() == 12.0
    assert [parameter.item() for parameter in model.parameters()] == [2.5, 1.0]
