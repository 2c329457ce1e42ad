"""What users do with a pipeline on accelerators, each in a world of fake ones."""

import gc
from collections.abc import Callable
from contextlib import suppress
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from gpipe import GPipe
from gpipe.execution.engine import NUM_FIRST_LOOKS
from gpipe.schedule import LOOPED_SCHEDULES
from tests.layers import Head, Pop, Stash
from tests.members import CHECKPOINT_MODES, FACES, WAYS, train_once
from tests.streams.caller import before_deletion, follow, on, streams
from tests.streams.fakes import Call, World
from tests.streams.scenario_layers import WIDTH, Doubling, Failing, First, Masks, Moves
from tests.streams.world import world

__all__ = ["SCENARIOS", "run"]

ROWS, CHUNKS = 8, 4
BALANCE = [2, 2, 1]

Scenario = Callable[[World], None]


def run(name: str, left_out: tuple[Call, ...] = ()) -> World:
    """The world in which a scenario has happened, and its garbage is gone."""
    with world(len(BALANCE), left_out) as made:
        torch.manual_seed(0)
        SCENARIOS[name](made)
        gc.collect(1)  # what is young, which all of it is
    return made


def layers() -> list[nn.Module]:
    """Five layers for three stages."""
    return [
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
    ]  # fmt: skip


def wrap(made: World, *modules: nn.Module, **kwargs: object) -> GPipe:
    """A model over all devices of the world."""
    settings: dict[str, object] = {"balance": BALANCE, "chunks": CHUNKS, "devices": made.names}
    model = GPipe(nn.Sequential(*(modules or layers())), **(settings | kwargs))  # type: ignore[arg-type]
    # In the first mini-batches the host waits so as to look at recomputes, and nothing could race.
    model._engine._num_trained = NUM_FIRST_LOOKS
    return model


def batch(made: World) -> tuple[Tensor, Tensor]:
    """An input on the first device and a target on the last."""
    x, y = torch.randn(ROWS, WIDTH).to(made.names[0]), torch.randn(ROWS, WIDTH).to(made.names[-1])
    return x.requires_grad_(), y


@torch.no_grad()
def descend(model: nn.Module) -> None:
    """An optimizer step on the caller's streams, which then forgets the gradients."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def training(face: str, schedule: str, checkpoint: str) -> Scenario:
    """Three mini-batches, each with an optimizer step."""

    def scenario(made: World) -> None:
        model = wrap(made, schedule=schedule, checkpoint=checkpoint)
        for _ in range(3):
            x, y = batch(made)
            train_once(model, face, x, y, mse_loss)
            descend(model)
            x.grad.mul(2)

    return scenario


def looped(face: str, schedule: str, checkpoint: str) -> Scenario:
    """Several stages on each device."""

    def scenario(made: World) -> None:
        modules = [*layers(), nn.Tanh()]
        options = {"schedule": schedule, "checkpoint": checkpoint, "chunks": 6}
        model = wrap(made, *modules, balance=[1] * 6, **options)
        for _ in range(2):
            train_once(model, face, *batch(made), mse_loss)
            descend(model)

    return scenario


def input_on_the_host(made: World) -> None:
    """Input and target are pinned, and filled again after the call."""
    for face in ("step", "backward"):
        model = wrap(made)
        x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        for _ in range(2):
            train_once(model, face, x, y if face == "step" else y.to(made.names[-1]), mse_loss)
            x.fill_(1.0)
            y.fill_(1.0)
            descend(model)


def input_elsewhere(made: World) -> None:
    """Input and target live on devices of other stages."""
    model = wrap(made)
    x, y = torch.randn(ROWS, WIDTH).to(made.names[1]), torch.randn(ROWS, WIDTH).to(made.names[0])
    for _ in range(2):
        train_once(model, "step", x, y, mse_loss)
        x.fill_(1.0)
        y.fill_(1.0)


def skips(made: World) -> None:
    """A skip over the stage in the middle."""
    for face, schedule, checkpoint in WAYS:
        model = wrap(
            made, nn.Linear(WIDTH, WIDTH), Stash(), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
            nn.Linear(WIDTH, WIDTH), Pop(), schedule=schedule, checkpoint=checkpoint,
            balance=[2, 2, 2],
        )  # fmt: skip
        for _ in range(2):
            train_once(model, face, *batch(made), mse_loss)
            descend(model)


def ties(made: World) -> None:
    """The first and the last stage share a weight, whose copy is renewed under other streams."""
    first, *others = layers()
    model = wrap(made, first, *others, Head(first.weight), balance=[2, 2, 2])
    batches = [batch(made) for _ in range(4)]  # where the host waits for the copies
    train_once(model, "step", *batches[0], mse_loss)
    descend(model)
    early, late = streams(made), streams(made)
    for current, (x, _) in zip((early, late), batches[1:], strict=False):
        with on(current), torch.no_grad():
            model(x)
    follow(late, early)
    with on(late):
        descend_by_nothing(model)
        train_once(model, "backward", *batches[3], mse_loss)
    before_deletion(made, early, late)


@torch.no_grad()
def descend_by_nothing(model: nn.Module) -> None:
    """Change all parameters, so that copies are renewed."""
    for parameter in model.parameters():
        parameter += 0.0


def norms_weights_outputs(made: World) -> None:
    """Deferred statistics, a loss with a weight that is known at the end, and a kept output."""
    model = wrap(
        made, nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
        nn.BatchNorm1d(WIDTH), deferred_batch_norm=True,
    )  # fmt: skip
    for _ in range(2):
        x, _ = batch(made)
        target = torch.tensor([0, 1, -100, 2, 3, 0, 1, 2]).to(made.names[-1])
        result = model.step(x, target, cross_entropy, return_output=True)
        (result.output * result.loss).sum()
        descend(model)
        model(x)


def evaluations_in_turn(made: World) -> None:
    """Evaluation under one stream of the caller, then under another, with nothing between them."""
    model = wrap(made).eval()
    both = [streams(made), streams(made)]
    for _ in range(2):
        for current in both:
            with on(current):
                x, y = batch(made)
                model(x).mul(2)
                model.step(x, y, mse_loss).loss.mul(2)
    before_deletion(made, *both)


def backward_elsewhere(made: World) -> None:
    """`backward()` under another stream than the forward; gradients are read under either."""
    model = wrap(made)
    for reads_first in (True, False, True, False):
        early, late, again = streams(made), streams(made), streams(made)
        with on(early):
            x, _ = batch(made)
            output = Doubling.apply(model(x), early)
        follow(late, early)
        with on(late):
            output.backward(torch.ones_like(output))
        reader = early if reads_first else late
        with on(reader):
            descend(model)
            follow(again, reader)
            x.grad.mul(2)
        del x, output
        with on(again), torch.no_grad():  # takes up the memory that was freed
            model(batch(made)[0])
        before_deletion(made, early, late, again)


def passed_through(made: World) -> None:
    """What the caller passes in goes through a stage as it is, and is then written to."""
    model = wrap(made, Masks(), Masks(), Masks(), First(), balance=[1, 1, 2])
    for _ in range(3):
        x, _ = batch(made)
        mask = torch.ones(ROWS, WIDTH).to(made.names[0])
        with torch.no_grad():
            model((x, mask))
        mask.fill_(0.0)


def whole_on_the_host(made: World) -> None:
    """Every micro-batch gets a mask that is on the host, and filled again after the call."""
    model = wrap(made, Masks(), Masks(), Masks(), First(), balance=[1, 1, 2], split=(0, None))
    mask = torch.ones(WIDTH)
    for _ in range(3):
        x, y = batch(made)
        model.step((x, mask), y, mse_loss)
        mask.fill_(0.0)
        descend(model)


def gradient_passed_through(made: World) -> None:
    """The gradient of the output goes through the last stage as it is, and is then written to."""
    model = wrap(made, *layers()[:4], nn.Identity())
    gradients = [torch.ones(ROWS, WIDTH).to(made.names[-1]) for _ in range(3)]
    inputs = [batch(made)[0] for _ in gradients]
    for x, gradient in zip(inputs, gradients, strict=True):
        model(x).backward(gradient)
        gradient.fill_(0.0)


def input_on_its_way_to_the_host(made: World) -> None:
    """The input is on the host, or will be when the caller's stream has come there."""
    model = wrap(made)
    _, y = batch(made)
    inputs = [torch.randn(ROWS, WIDTH).to(made.names[0]) for _ in range(3)]
    for x in inputs:
        model.step((x * 2).to("cpu", non_blocking=True), y, mse_loss)


def moved_by_a_layer(made: World) -> None:
    """A layer puts its result where the next stage is, or the output on the host."""
    for face, schedule, checkpoint in WAYS:
        model = wrap(
            made, Moves(made.names[1]), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH),
            Moves("cpu"), balance=[1, 1, 2], schedule=schedule, checkpoint=checkpoint,
        )  # fmt: skip
        for _ in range(2):
            x, _ = batch(made)
            y = torch.randn(ROWS, WIDTH)
            train_once(model, face, x, y, lambda output, target: mse_loss(output, target.cpu()))
            descend(model)


def failure(made: World) -> None:
    """A step fails, and the caller puts other numbers into its weights and its input."""
    failing = Failing()
    model = wrap(made, *layers(), failing, balance=[2, 2, 2])
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    for failing.fails in (False, False, True):  # the host waits in the first two, to learn
        with suppress(ValueError):
            model.step(x, y, mse_loss)
        x.fill_(0.0)
        y.fill_(0.0)
        descend_by_nothing(model)


SCENARIOS: dict[str, Scenario] = {
    **{" ".join(way): training(*way) for way in WAYS},
    **{" ".join(way): looped(*way) for way in product(FACES, LOOPED_SCHEDULES, CHECKPOINT_MODES)},
    "input on the host": input_on_the_host,
    "input elsewhere": input_elsewhere,
    "input on its way to the host": input_on_its_way_to_the_host,
    "moved by a layer": moved_by_a_layer,
    "passed through": passed_through,
    "whole on the host": whole_on_the_host,
    "gradient passed through": gradient_passed_through,
    "skips": skips,
    "ties": ties,
    "norms, weights, outputs": norms_weights_outputs,
    "evaluations in turn": evaluations_in_turn,
    "backward elsewhere": backward_elsewhere,
    "failure": failure,
}
