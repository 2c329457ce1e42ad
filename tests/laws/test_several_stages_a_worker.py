"""Schedules in which a worker has several stages, and those that users write."""

from itertools import product

import pytest
import torch
from torch import nn

from gpipe import GPipe
from gpipe.errors import ScheduleError
from gpipe.schedule import (
    Action,
    Kind,
    Schedule,
    add_recompute,
    add_transfers,
    fill_drain,
    looped_breadth_first,
    resolve,
)
from tests.members import (
    CHECKPOINT_MODES,
    FACES,
    intra_op_threads,
    mlp,
    relative_difference,
    take_gradients,
    train_once,
)

LOOPED = ("interleaved_1f1b", "looped_breadth_first")
WORKERS_AND_SHARES = [(1, 2), (2, 1), (2, 2), (2, 3), (3, 2)]


def piped(schedule: object, num_workers: int, num_stages: int, chunks: int, **options) -> GPipe:
    devices = ["cpu"] * num_workers
    return GPipe(mlp(), num_stages, chunks, schedule=schedule, devices=devices, **options)


def batch(num_rows: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, num_rows, 6, generator=torch.Generator().manual_seed(num_rows))
    return x.to(dtype), y.to(dtype)


def assert_trains_like(module: nn.Module, model: GPipe, num_rows: int) -> None:
    """The gradients of both faces are those of the plain module."""
    x, y = batch(num_rows)
    for face in FACES:
        train_once(module, "backward", x, y, nn.MSELoss())
        plain = take_gradients(module)
        train_once(model, face, x, y, nn.MSELoss())
        for name, gradient in take_gradients(model).items():
            assert relative_difference(gradient, plain[name]) <= 1e-12, (name, face)


@pytest.mark.parametrize("schedule", LOOPED)
@pytest.mark.parametrize(("num_workers", "share"), WORKERS_AND_SHARES)
def test_gradients_equal_those_of_the_plain_model(schedule, num_workers, share):
    module = mlp().double()
    for checkpoint, chunks in product(CHECKPOINT_MODES, (1, 2, 3, 5)):
        model = piped(schedule, num_workers, num_workers * share, chunks, checkpoint=checkpoint)
        model.double()
        for num_rows in (1, 3, 10):
            assert_trains_like(module, model, num_rows)


# Backwards in the same order of micro-batches give the same bits, however stages are shared out.
@pytest.mark.parametrize(
    ("schedule", "like"), [("interleaved_1f1b", "1f1b"), ("looped_breadth_first", "fill_drain")]
)
@pytest.mark.parametrize("face", FACES)
def test_bits_are_those_of_the_schedule_with_one_stage_a_worker(face, schedule, like):
    def gradients(model: GPipe) -> list[torch.Tensor]:
        train_once(model, face, *batch(10, torch.float32), nn.MSELoss())
        return [gradient for gradient in take_gradients(model).values() if gradient is not None]

    with intra_op_threads(1):
        reference = gradients(GPipe(mlp(), 1, 4, schedule=like))
        for (num_workers, share), checkpoint in product(WORKERS_AND_SHARES, CHECKPOINT_MODES):
            model = piped(schedule, num_workers, num_workers * share, 4, checkpoint=checkpoint)
            for mine, other in zip(gradients(model), reference, strict=True):
                assert torch.equal(mine, other), (num_workers, share, checkpoint)


# Law 12, its executed half.
@pytest.mark.parametrize("schedule", LOOPED)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_what_was_done_is_what_the_schedule_says(schedule, checkpoint):
    model = piped(schedule, 2, 6, 3, checkpoint=checkpoint)
    timeline = model.step(*batch(6, torch.float32), nn.MSELoss()).timeline
    assert timeline.rows == add_recompute(resolve(schedule, 6, 3, 2), checkpoint).rows


def test_devices_belong_to_workers():
    model = piped("interleaved_1f1b", 2, 4, 2)
    assert len(model.devices) == 2
    assert [stage.index for stage in model.stages] == [0, 1, 2, 3]


def test_without_devices_every_stage_has_a_worker():
    assert len(GPipe(mlp(), 4, chunks=2, schedule="interleaved_1f1b").devices) == 4


def test_stages_must_be_shared_out_evenly():
    with pytest.raises(ValueError, match="3 stages cannot be shared evenly by 2 workers"):
        piped("interleaved_1f1b", 2, 3, 2)


def last_first(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards from the last micro-batch to the first, and all backwards the other way."""
    there = [
        [Action(Kind.FORWARD, stage, m) for m in reversed(range(num_microbatches))]
        for stage in range(num_stages)
    ]
    back = [
        [Action(Kind.BACKWARD, stage, m) for m in range(num_microbatches)]
        for stage in range(num_stages)
    ]
    rows = [[*forwards, *backwards] for forwards, backwards in zip(there, back, strict=True)]
    return Schedule(rows, num_stages, num_microbatches)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize(
    "spec",
    [
        last_first,
        last_first(3, 4),
        add_transfers(fill_drain(3, 4)),
        add_transfers(add_recompute(fill_drain(3, 4), "always")),
    ],
    ids=["function", "schedule", "with transfers", "with recomputes"],
)
def test_users_may_write_a_schedule(spec, checkpoint):
    module = mlp().double()
    model = GPipe(module, 3, chunks=4, schedule=spec, checkpoint=checkpoint)
    assert_trains_like(module, model, num_rows=8)


def test_stages_may_lie_on_any_workers():
    # Stages 0, 1 on one worker and 2, 3 on the other: neighbours, unlike in the named schedules.
    def halves(num_stages: int, num_microbatches: int) -> Schedule:
        wide = looped_breadth_first(1, num_stages, num_microbatches)
        (row,) = wide.rows
        half = num_stages // 2
        rows = [[a for a in row if (a.stage < half) == first] for first in (True, False)]
        return Schedule(rows, num_stages, num_microbatches)

    module = mlp().double()
    model = GPipe(module, 4, chunks=3, schedule=halves)
    assert len(model.devices) == 2
    assert_trains_like(module, model, num_rows=7)


def test_a_schedule_of_other_sizes_is_refused_with_both():
    with pytest.raises(ScheduleError, match=r"is for 3 stages, 4 micro-batches .* with 2 stages"):
        GPipe(mlp(), 2, chunks=4, schedule=fill_drain(3, 4))
    model = GPipe(mlp(), 3, chunks=4, schedule=fill_drain(3, 4))
    with pytest.raises(ScheduleError, match=r"4 micro-batches and 3 workers; .* 2 micro-batches"):
        model.step(*batch(2, torch.float32), nn.MSELoss())


def test_a_deadlock_is_refused_before_anything_runs():
    def crossed(num_stages: int, num_microbatches: int) -> Schedule:
        rows = [list(row) for row in fill_drain(num_stages, num_microbatches).rows]
        rows[0].sort(key=lambda action: (action.microbatch, action.kind != Kind.FORWARD))
        rows[1].sort(key=lambda action: (-action.microbatch, action.kind != Kind.FORWARD))
        return Schedule(rows, num_stages, num_microbatches)

    with pytest.raises(ScheduleError, match="deadlocks"):
        GPipe(mlp(), 2, chunks=2, schedule=crossed)
