"""Laws 2 and 3: randomness is a function of key, micro-batch and layer."""

import threading
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe, is_recomputing
from tests.laws.drawing import (
    CHUNKS,
    DRAWING,
    FACES_AND_SCHEDULES,
    NUM_ROWS,
    Call,
    Result,
    Scale,
    build,
    dropping,
    inner_checkpoint,
    inputs,
    over_faces,
    same,
    square_sum,
    train,
)
from tests.members import CHECKPOINT_MODES, FACES, SCHEDULES, intra_op_threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with intra_op_threads(1):
        yield


# One seed means one result, however the model is cut and whatever is recomputed: in a first
# mini-batch, in which the engine learns which layers draw, as in later ones.
@pytest.mark.parametrize("name", DRAWING)
@over_faces
def test_the_same_seed_gives_the_same_bits(face, schedule, name):
    x = inputs(name)
    reference = train(build(name, 1, "never", schedule), face, x, seed=5)
    assert not same(reference, train(build(name, 1, "never", schedule), face, x, seed=6))
    for num_stages, checkpoint in product((1, 2, 3), CHECKPOINT_MODES):
        model = build(name, num_stages, checkpoint, schedule)
        for _ in range(2 if num_stages == 3 else 1):
            result = train(model, face, x, seed=5)
            assert same(result, reference), (num_stages, checkpoint)


# The order of actions has no say either. (Gradients are summed in another order, so they may differ
# in their last bits; outputs may not.)
@pytest.mark.parametrize("name", DRAWING)
def test_the_schedule_has_no_say_in_what_is_drawn(name):
    outputs = [
        train(build(name, 3, "always", schedule), face, inputs(name), seed=5)[0]
        for face, schedule in FACES_AND_SCHEDULES
    ]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


# A gradient that met another mask than its forward is wrong without any sign of it.
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@over_faces
def test_gradients_see_the_masks_of_their_forwards(face, schedule, checkpoint):
    layers = (Scale(), nn.Dropout(0.5), nn.Identity(), nn.Dropout(0.5))
    model = GPipe(nn.Sequential(*layers), 3, CHUNKS, checkpoint=checkpoint, schedule=schedule)
    for seed in (None, None, 7):
        output, of_x, of_weight = train(model, face, torch.ones(NUM_ROWS, 8), seed)
        assert 0 < output.count_nonzero() < output.numel()
        # An output is 1.5·4·x or 0; of the square it is the gradient 2·output·1.5·4.
        assert torch.equal(of_x, 2 * output * 6)
        assert of_weight.item() == pytest.approx((2 * output * 4).sum().item())


class Mask(nn.Module):
    """Draws a mask and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand_like(x)
        if not is_recomputing():
            self.masks.append(mask)
        return x * mask


@pytest.mark.parametrize("num_stages", [1, 3])
@over_faces
def test_no_two_masks_are_the_same(face, schedule, num_stages):
    module = nn.Sequential(Scale(), Mask(), Mask())
    model = GPipe(module, num_stages, 4, schedule=schedule, checkpoint="always")
    for _ in range(3):
        train(model, face, torch.ones(NUM_ROWS, 8))
    masks = [mask for layer in (model[1], model[2]) for mask in layer.masks]
    assert len(masks) == 2 * 3 * 4  # layers, mini-batches, micro-batches
    for i, mask in enumerate(masks):
        assert not any(torch.equal(mask, other) for other in masks[:i])
    drawn = torch.cat(masks).flatten()
    assert len(drawn.unique()) > 0.99 * len(drawn)
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.05)


# A layer that draws in evaluation (Monte Carlo dropout) follows the same rule.
@over_faces
def test_evaluation_with_a_drawing_layer(face, schedule):
    def outputs(num_stages: int) -> list[Tensor]:
        model = build("Dropout", num_stages, "always", schedule).eval()
        model[2].train()
        torch.manual_seed(5)
        x = inputs("Dropout")
        if face == "step":
            return [model.step(x, x, square_sum, loss_reduction="sum").loss for _ in range(2)]
        return [model(x) for _ in range(2)]

    first, second = outputs(1)
    assert not torch.equal(first, second)
    for num_stages in (2, 3):
        assert same(outputs(num_stages), [first, second])


# A loss may draw, too; it stands behind the last layer, wherever that is.
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_that_draws(schedule):
    def loss_fn(output: Tensor, _: Any) -> Tensor:
        return (output * torch.rand_like(output)).sum()

    results = []
    for num_stages, checkpoint in product((1, 3), CHECKPOINT_MODES):
        torch.manual_seed(5)
        model = GPipe(
            nn.Sequential(Scale(), nn.Tanh(), Scale()), num_stages, CHUNKS,
            checkpoint=checkpoint, schedule=schedule,
        )  # fmt: skip
        for _ in range(2):
            x = torch.ones(NUM_ROWS, 8)
            loss = model.step(x, x, loss_fn, loss_reduction="sum").loss
            results.append([loss, *(parameter.grad for parameter in model.parameters())])
            model.zero_grad()
    assert not same(results[0], results[1])
    assert all(same(result, results[i % 2]) for i, result in enumerate(results))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("face", FACES)
def test_compiled_layers_that_draw(face, backend):
    def run(num_stages: int, checkpoint: str) -> Result:
        torch.manual_seed(0)
        layers = [Scale(), torch.compile(dropping(), backend=backend), Scale()]
        model = GPipe(nn.Sequential(*layers), num_stages, CHUNKS, checkpoint=checkpoint)
        x = torch.ones(NUM_ROWS, 8)
        return [*train(model, face, x, seed=5), *train(model, face, x)]

    reference = run(1, "never")
    assert not same(reference[: len(reference) // 2], reference[len(reference) // 2 :])
    assert same(run(1, "always"), reference)
    assert same(run(3, "always"), reference)


class DrawsTwice(nn.Module):
    """Draws, lets the other stage come between if it can, and draws again."""

    def __init__(self, mine: threading.Event, other: threading.Event, meets_at: int) -> None:
        super().__init__()
        self.mine, self.other, self.meets_at = mine, other, meets_at
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        first = torch.rand_like(x)
        if self.num_calls == self.meets_at:
            self.mine.set()
            self.other.wait(0.1)  # in vain, if nobody else may draw now
        self.num_calls += 1
        return torch.tanh(x * first * torch.rand_like(x))


# All threads share one generator, so while one draws the others must wait; in the backward, too,
# where a checkpoint inside a layer sets the generator to run once more. The calls of a layer are
# the forwards of micro-batches 0 and 1, then the backwards of 1 and 0: the given ones of the two
# stages come at the same moment.
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("calls", [(1, 0), (2, 3)], ids=["forward", "backward"])
def test_two_stages_that_want_to_draw_at_the_same_moment(calls, use_reentrant):
    def run(num_stages: int) -> Result:
        events = [threading.Event(), threading.Event()]
        inner = [
            DrawsTwice(events[mine], events[1 - mine], calls[mine] if num_stages == 2 else -1)
            for mine in range(2)
        ]
        layers = [Call(inner_checkpoint(use_reentrant), layer) for layer in inner]
        module = nn.Sequential(Scale(), layers[0], Scale(), layers[1])
        model = GPipe(module, num_stages, 2, checkpoint="never")
        results = []
        for seed in (5, 6):  # the second time, it is known which layers draw
            results += train(model, "backward", torch.ones(4, 8), seed)
            for event, layer in zip(events, inner, strict=True):
                event.clear()
                layer.num_calls = 0
        return results

    assert same(run(2), run(1))
