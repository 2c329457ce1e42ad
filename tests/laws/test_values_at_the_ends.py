"""Law 1: whatever goes in, comes out or is the target, as in the plain model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe
from tests.laws.values import (
    CHUNKS,
    NUM_ROWS,
    Do,
    Pair,
    State,
    assert_as_plain,
    rows,
    three_stages,
)
from tests.members import CHECKPOINT_MODES, SCHEDULES, over_all_ways

# What the last layer gives out.
OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda w, x: (w * x, x.sin() * w),
    "dict": lambda w, x: {"y": w * x, "more": [x * w * w]},
    "named tuple": lambda w, x: Pair(w * x, x.argmax(dim=1)),
    "dataclass": lambda w, x: State(w * x, x > 0, {"half": w * x / 2, "name": "out"}),
    "some without grad": lambda w, x: ((w * x).detach(), w * x, x > 0, x.argmax(dim=1)),
    "None and plain values": lambda w, x: (None, w * x, 3, "name"),
    "complex": lambda w, x: torch.complex(w * x, x),
    "one tensor twice": lambda w, x: (lambda y: (y, y))(w * x),
    "one row, not a matrix": lambda w, x: (w * x).sum(dim=1),
    "its input": lambda w, x: x,
}


@pytest.mark.parametrize("name", OUTPUTS)
@over_all_ways
def test_whatever_comes_out(face, schedule, checkpoint, name):
    module = three_stages(Do(lambda w, x: w * x), Do(OUTPUTS[name]))
    assert_as_plain(module, (face, schedule, checkpoint), rows(), torch.zeros(NUM_ROWS))


INPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor, Any], Tensor]]] = {
    "tuple": (lambda x: (x, x.detach() > 0), lambda w, v: w * v[0] * v[1]),
    "list": (lambda x: [x, [x.detach()]], lambda w, v: w * v[0] * v[1][0]),
    "nested dict": (
        lambda x: {"a": x, "b": (torch.arange(NUM_ROWS), None)},
        lambda w, v: w * v["a"] + v["b"][0].unsqueeze(1),
    ),
    "named tuple": (
        lambda x: Pair(x, torch.arange(NUM_ROWS)),
        lambda w, v: w * v.hidden + v.index.unsqueeze(1),
    ),
    "dataclass": (
        lambda x: State(x, x.detach() > 0, {"n": 2.0}),
        lambda w, v: (w * v.hidden * v.extra["n"]).masked_fill(v.mask, 0.5),
    ),
    "plain values": (
        lambda x: (2.0, x, "cos", None),
        lambda w, v: getattr(torch, v[2])(w * v[1] * v[0]),
    ),
    "one tensor twice": (lambda x: (x, x), lambda w, v: w * v[0] * v[1]),
    "column-major": (lambda x: x.detach().T.contiguous().T.requires_grad_(), lambda w, v: w * v),
    "expanded": (lambda x: x.detach()[:, :1].expand(-1, 6), lambda w, v: w * v),
    "complex": (lambda x: torch.complex(x, x).detach().requires_grad_(), lambda w, v: w * v.real),
    "tokens": (lambda x: torch.arange(NUM_ROWS) % 6, lambda w, v: w[v].unsqueeze(1)),
}


@pytest.mark.parametrize("name", INPUTS)
@over_all_ways
def test_whatever_goes_in(face, schedule, checkpoint, name):
    make, first = INPUTS[name]
    module = three_stages(Do(first), Do(lambda w, x: w.sum() * x))
    x = make(rows().detach().requires_grad_())
    assert_as_plain(module, (face, schedule, checkpoint), x, torch.zeros(NUM_ROWS))


TARGETS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor, Any], Tensor]]] = {
    "tuple": (lambda y: (y, y > 0), lambda o, t: ((o - t[0]) * t[1]).square().sum()),
    "nested": (
        lambda y: {"y": [y], "weight": (y[:, 0].exp(), None, 2.0)},
        lambda o, t: t["weight"][2] * (t["weight"][0] * (o - t["y"][0]).square().sum(dim=1)).sum(),
    ),
    "dataclass": (lambda y: State(y, y > 0), lambda o, t: ((o - t.hidden) * t.mask).abs().sum()),
    "classes": (
        lambda y: y.argmax(dim=1),
        lambda o, t: nn.functional.cross_entropy(o, t, reduction="sum"),
    ),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_whatever_the_target_is(schedule, checkpoint, name):
    make, loss_fn = TARGETS[name]
    module = three_stages(Do(lambda w, x: w * x), Do(lambda w, x: w * x))
    target = make(rows(requires_grad=False).flip(0))
    assert_as_plain(module, ("step", schedule, checkpoint), rows(), target, loss_fn)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_an_output_of_which_nothing_requires_grad(checkpoint):
    module = three_stages(Do(lambda w, x: w * x), Do(lambda w, x: (x > 0, x.detach())))
    model = GPipe(module, 3, CHUNKS, checkpoint=checkpoint)
    for mine, other in zip(model(rows()), module(rows()), strict=True):
        assert not mine.requires_grad
        assert torch.equal(mine, other)


def test_nested_values_in_eval_and_inference_mode():
    for make, first in INPUTS.values():
        module = three_stages(Do(first), Do(lambda w, x: {"y": w.sum() * x, "n": 3}))
        model = GPipe(module, 3, CHUNKS).eval()
        x = make(rows().detach())
        expected = module(x)["y"].detach()
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                output = model(x)
                assert output["n"] == 3
                assert not output["y"].requires_grad
                torch.testing.assert_close(output["y"].clone(), expected, rtol=1e-12, atol=0)
