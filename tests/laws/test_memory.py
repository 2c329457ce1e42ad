"""Law 7: what a stage holds, and that it holds nothing else."""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.memory import table
from gpipe import GPipe
from tests.live_bytes import NUM_LEARNING, LiveBytes, formula, held, layers, peak_bytes
from tests.members import CHECKPOINT_MODES, SCHEDULES, train_once

WIDTH = 16
ROWS = 4  # of a micro-batch
LAYERS = 3  # of a stage
BOUNDARY_BYTES = ROWS * WIDTH * 4
WAYS = [("step", "fill_drain"), ("step", "1f1b"), ("backward", "fill_drain")]
SIZES = [(1, 4), (2, 1), (2, 5), (3, 2), (4, 8)]


@pytest.fixture(autouse=True)
def no_search_for_cycles() -> Iterator[None]:
    """What is only freed by Python's search for cycles lives for nobody knows how long."""
    gc.disable()
    yield
    gc.enable()


def built(num_stages: int, num_microbatches: int, **options) -> GPipe:
    module = layers(num_stages * LAYERS, WIDTH)
    return GPipe(module, [LAYERS] * num_stages, num_microbatches, **options)


def training(
    model: GPipe, face: str, loss_fn: Callable[..., Tensor] | None = None
) -> Callable[[], object]:
    x = torch.randn(model.chunks * ROWS, WIDTH)
    return partial(train_once, model, face, x, x, loss_fn or saves_nothing)


def saves_nothing(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def saves_its_input(output: Tensor, target: Tensor) -> Tensor:
    return output.square().sum()


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize(("face", "schedule"), WAYS)
def test_the_peak_is_that_of_the_formula(face, schedule, checkpoint, num_stages, num_microbatches):
    model = built(num_stages, num_microbatches, schedule=schedule, checkpoint=checkpoint)
    counts = [held(schedule, stage, num_stages, num_microbatches) for stage in range(num_stages)]
    inside_bytes = LAYERS * BOUNDARY_BYTES
    expected = [formula(count, checkpoint, BOUNDARY_BYTES, inside_bytes) for count in counts]
    assert peak_bytes(model, training(model, face)) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_graph_of_the_loss_is_inside_the_last_stage(schedule, checkpoint):
    # So a checkpointed last stage has it for one micro-batch at a time.
    model = built(2, 5, schedule=schedule, checkpoint=checkpoint)
    *_, last = peak_bytes(model, training(model, "step", saves_its_input))
    inside_bytes = (LAYERS + 1) * BOUNDARY_BYTES
    count = held(schedule, 1, 2, 5)
    assert last == pytest.approx(formula(count, checkpoint, BOUNDARY_BYTES, inside_bytes), rel=0.05)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize(("face", "schedule"), WAYS)
def test_nothing_lives_after_the_backward(face, schedule, checkpoint):
    model = built(3, 4, schedule=schedule, checkpoint=checkpoint)
    train = training(model, face)
    with LiveBytes(model) as live:
        for _ in range(NUM_LEARNING + 1):
            train()
            assert live.now() == [0, 0, 0]


def test_the_output_of_a_model_keeps_nothing_after_the_backward_and_all_before():
    model = built(2, 4, checkpoint="never")
    training(model, "backward")()
    with LiveBytes(model) as live:
        output = model(torch.randn(4 * ROWS, WIDTH))
        whole = formula(4, "never", BOUNDARY_BYTES, LAYERS * BOUNDARY_BYTES)
        assert live.now() == [whole, whole]
        output.sum().backward()
        assert live.now() == [0, 0]
        output = model(torch.randn(4 * ROWS, WIDTH))
        del output
        assert live.now() == [0, 0]


class Fails(nn.Module):
    """Fails in the third micro-batch, forward or backward, while it is armed."""

    def __init__(self, in_backward: bool) -> None:
        super().__init__()
        self.in_backward, self.armed, self.calls = in_backward, False, 0

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        if self.in_backward:
            x.register_hook(lambda _: self.count())
        else:
            self.count()
        return x

    def count(self) -> None:
        self.calls += self.armed
        if self.calls == 3:
            raise KeyError("mine")


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize(("face", "schedule"), WAYS)
def test_nothing_lives_after_a_failure(face, schedule, checkpoint, in_backward):
    fails = Fails(in_backward)
    module = nn.Sequential(*layers(2, WIDTH), fails, *layers(2, WIDTH))
    model = GPipe(module, [2, 3], chunks=5, schedule=schedule, checkpoint=checkpoint)
    train = training(model, face)
    train()
    fails.armed = True
    with LiveBytes(model) as live:
        with pytest.raises(KeyError, match="mine") as caught:
            train()
        del caught  # its traceback has the frames of the failed actions
        assert live.now() == [0, 0]


def test_a_forward_without_grad_holds_one_boundary_at_a_time():
    model = built(3, 6)
    x = torch.randn(6 * ROWS, WIDTH)
    with LiveBytes(model) as live:
        with torch.no_grad():
            model(x)
        model.eval()(x)
        model.step(x, x, saves_nothing)
        assert live.peak == [BOUNDARY_BYTES] * 3
        assert live.now() == [0, 0, 0]


def watched_outputs(model: GPipe) -> list[StorageWeakRef]:
    """The outputs of the last layer, as they come; forwards and recomputes."""
    outputs: list[StorageWeakRef] = []

    def see(_module: nn.Module, _args: object, output: Tensor) -> None:
        outputs.append(StorageWeakRef(output.untyped_storage()))

    model[-1].register_forward_hook(see)
    return outputs


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_outputs_that_nobody_asked_for_are_freed_at_once(schedule, checkpoint):
    model = built(2, 4, schedule=schedule, checkpoint=checkpoint)
    train = training(model, "step")
    train()
    outputs, num_alive = watched_outputs(model), []

    def count(*_: object) -> None:
        num_alive.append(sum(not output.expired() for output in outputs))

    model[LAYERS].register_forward_pre_hook(count)
    train()
    count()
    assert len(outputs) in (4, 7, 8)
    assert not any(num_alive)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_joined_outputs_are_not_held_in_pieces(checkpoint):
    # The caller has the whole. A stage needs the graph of a piece, not what is in it.
    model = built(2, 4, checkpoint=checkpoint)
    outputs = watched_outputs(model)
    whole = model(torch.randn(4 * ROWS, WIDTH))
    assert len(outputs) == 4
    assert all(output.expired() for output in outputs)
    whole.sum().backward()
    outputs.clear()

    result = model.step(*torch.randn(2, 4 * ROWS, WIDTH), saves_nothing, return_output=True)
    assert result.output.shape == (4 * ROWS, WIDTH)
    assert all(output.expired() for output in outputs)


def test_the_table_in_the_docs_is_what_the_benchmark_prints():
    page = Path(__file__).parents[2] / "docs/memory.md"
    assert table() in page.read_text()
