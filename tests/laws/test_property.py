"""Laws 1 to 3 and 13 over whatever model, cut, batch and schedule hypothesis draws.

In CI 300 examples that are always the same. The long run, with new examples each time:

    GPIPE_PROPERTIES=thorough .venv/bin/python -m pytest tests/laws/test_property.py
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from gpipe import GPipe
from tests.laws.parts import DRAWING, NUM_CHANNELS, PARTS, WIDTH
from tests.members import CHECKPOINT_MODES, FACES, SCHEDULES, intra_op_threads, train_once

COMMON = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
PROFILES = {
    "ci": settings(COMMON, max_examples=300, derandomize=True),
    "thorough": settings(COMMON, max_examples=6000, print_blob=True),
}
PROFILE = PROFILES[os.environ.get("GPIPE_PROPERTIES", "ci")]


def sum_and_weight(output: Tensor, target: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    wanted, weight = target
    return ((output - wanted).square().sum(dim=(1, 2)) * weight).sum(), weight.sum()


def weighted_mean(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    total, weight = sum_and_weight(output, target)
    return total / weight


# The loss of step, its loss_reduction, and the same over a whole mini-batch.
LOSSES: dict[str, tuple[Callable[..., Any], str, Callable[..., Tensor]]] = {
    "mean": (functional.mse_loss, "mean", functional.mse_loss),
    "sum": (nn.MSELoss(reduction="sum"), "sum", nn.MSELoss(reduction="sum")),
    "weighted": (sum_and_weight, "weighted", weighted_mean),
    "cross entropy": (nn.CrossEntropyLoss(), "mean", nn.CrossEntropyLoss()),
}


@dataclass(frozen=True)
class Example:
    """One way to train one model on one mini-batch after another."""

    parts: list[str]
    balance: list[int]
    chunks: int
    num_rows: list[int]
    face: str
    schedule: str
    checkpoint: str
    reduction: str
    dtype: torch.dtype
    input_asks: bool
    deferred: bool

    @property
    def draws(self) -> bool:
        return not DRAWING.isdisjoint(self.parts)

    @property
    def limit(self) -> float:
        return 1e-12 if self.dtype is torch.float64 else 1e-5

    def module(self) -> nn.Sequential:
        torch.manual_seed(0)
        layers = [layer for part in self.parts for layer in PARTS[part]()]
        return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).to(self.dtype)

    def batch(self, index: int) -> tuple[Tensor, Any]:
        generator = torch.Generator().manual_seed(index)
        shape = self.num_rows[index], NUM_CHANNELS, WIDTH
        x, y = torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(self.dtype)
        valid = torch.rand(len(x), generator=generator) < 0.6
        valid[-1] = True  # so that there is a loss
        if self.reduction == "weighted":
            return x, (y, valid.to(self.dtype))
        if self.reduction == "cross entropy":
            return x, (y[:, 0] > 0).long().masked_fill(~valid.unsqueeze(1), -100)
        return x, y


@st.composite
def examples(draw: st.DrawFn) -> Example:
    parts = draw(st.lists(st.sampled_from(list(PARTS)), max_size=5))
    # Behind a batch norm that saw micro-batches, another one has statistics of its own.
    parts = [p for i, p in enumerate(parts) if p != "batch norm" or p not in parts[:i]]
    num_layers = 1 + sum(len(PARTS[part]()) for part in parts)
    cuts = draw(st.sets(st.integers(1, num_layers - 1), max_size=3)) if num_layers > 1 else set()
    ends = [0, *sorted(cuts), num_layers]
    return Example(
        parts=parts,
        balance=[end - start for start, end in pairwise(ends)],
        chunks=draw(st.integers(1, 6)),
        num_rows=draw(st.lists(st.integers(1, 9), min_size=2, max_size=2)),
        face=draw(st.sampled_from(FACES)),
        schedule=draw(st.sampled_from(SCHEDULES)),
        checkpoint=draw(st.sampled_from(CHECKPOINT_MODES)),
        reduction=draw(st.sampled_from(list(LOSSES))),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        input_asks=draw(st.booleans()),
        deferred=draw(st.booleans()),
    )


def piped(example: Example, balance: list[int], checkpoint: str) -> GPipe:
    return GPipe(
        example.module(), balance, example.chunks, checkpoint=checkpoint,
        schedule=example.schedule, deferred_batch_norm=example.deferred,
    )  # fmt: skip


def gradients_of(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """The gradients of the parameters and the input, taken from them."""
    named = {**dict(model.named_parameters()), "the input": x}
    taken = {name: tensor.grad for name, tensor in named.items()}
    model.zero_grad()
    return taken


def train(model: GPipe, example: Example, index: int) -> dict[str, Tensor | None]:
    """All that a mini-batch leaves: loss, output, gradients, buffers, generator, evaluation."""
    loss_fn, loss_reduction, whole_loss = LOSSES[example.reduction]
    x, target = example.batch(index)
    x.requires_grad_(example.input_asks)
    torch.manual_seed(index)
    if example.face == "step":
        result = model.step(x, target, loss_fn, loss_reduction=loss_reduction, return_output=True)
        loss, output = result.loss, result.output
    else:
        output = model(x)
        loss = whole_loss(output, target)
        loss.backward()
    left = {
        "generator": torch.get_rng_state(),
        "loss": loss.detach(),
        "output": output.detach(),
        **gradients_of(model, x),
        **{name: buffer.clone() for name, buffer in model.named_buffers()},
        "evaluation": model.eval()(x),
    }
    model.train()
    return left


def train_plain(module: nn.Sequential, example: Example, index: int) -> dict[str, Tensor | None]:
    """The same from the plain model.

    Where it has a batch norm, the micro-batches go through one after the other, since each is
    normalised by itself; deferred statistics are those of the whole.
    """
    x, target = example.batch(index)
    x.requires_grad_(example.input_asks)
    slices, computing = [x], module
    if "batch norm" in example.parts:
        slices = x.tensor_split(min(example.chunks, len(x)))
        if example.deferred:
            computing = copy.deepcopy(module)
            module(x.detach())
    output = torch.cat([computing(each) for each in slices])
    loss = train_once(lambda _: output, "backward", x, target, LOSSES[example.reduction][2])
    left = {
        "loss": loss,
        "output": output.detach(),
        **gradients_of(computing, x),
        **{name: buffer.clone() for name, buffer in module.named_buffers()},
        "evaluation": module.eval()(x).detach(),
    }
    module.train()
    return left


def assert_law_3(example: Example, index: int, state: Tensor) -> None:
    """The caller's generator has given one number, or none where nothing draws."""
    generator = torch.Generator()
    states = {0: generator.manual_seed(index).get_state()}
    for bits, limit in ((32, 2), (64, 2**62)):
        torch.randint(limit, (), generator=generator.manual_seed(index))
        states[bits] = generator.get_state()
    drawn = [bits for bits, each in states.items() if torch.equal(state, each)]
    assert drawn in ([[32], [64]] if example.draws else [[0]])


def assert_equal(mine: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> None:
    assert mine.keys() == other.keys()
    for name, value in mine.items():
        assert (value is None) == (other[name] is None), name
        assert value is None or torch.equal(value, other[name]), name


def assert_close(
    mine: dict[str, Tensor | None], plain: dict[str, Tensor | None], limit: float
) -> None:
    """Differences are small by the largest number of all: a gradient may be 0 but for rounding."""
    assert mine.keys() == plain.keys()
    scale = max(1.0, *(v.abs().max().item() for v in plain.values() if v is not None))
    for name, value in plain.items():
        if value is None:
            assert mine[name] is None, name
        else:
            assert mine[name].dtype is value.dtype
            difference = (mine[name] - value).abs().max().item()
            assert difference <= limit * scale, (name, difference)


@PROFILE
@given(examples())
def test_any_model_trains_as_the_plain_one(example: Example) -> None:
    with intra_op_threads(1):
        model = piped(example, example.balance, example.checkpoint)
        uncut = piped(example, [sum(example.balance)], "never")
        plain = example.module()
        for index in range(2):  # what a first mini-batch teaches must hold in the second
            left = train(model, example, index)
            assert_equal(left, train(uncut, example, index))
            assert_law_3(example, index, left.pop("generator"))
            if not example.draws:
                assert_close(left, train_plain(plain, example, index), example.limit)
