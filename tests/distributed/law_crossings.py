"""Values of any kind that go in, come out and cross from process to process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.law_case import Case
from tests.laws.test_values import BOUNDARIES
from tests.laws.test_values_at_the_ends import INPUTS, OUTPUTS, TARGETS
from tests.laws.values import Do, loss_of
from tests.laws.values import rows as seven_rows

__all__ = ["ENDS", "VALUES"]


def four(first: nn.Module, last: nn.Module) -> nn.Sequential:
    """Between the ends are stages that return their very input."""
    return nn.Sequential(first, nn.Identity(), nn.Identity(), last)


def crossing(
    first: Callable[..., Any],
    last: Callable[..., Any],
    x: Callable[[], Any] = seven_rows,
    y: Callable[[], Any] = lambda: torch.zeros(7),
    loss_fn: Callable[..., Tensor] = loss_of,
) -> Case:
    return Case(
        lambda: four(Do(first), Do(last)),
        lambda: [(x(), y()) for _ in range(2)],
        lambda: loss_fn,
        {"chunks": 3},
        {"loss_reduction": "sum"},
    )


def times(w: Tensor, x: Tensor) -> Tensor:
    return w * x


def ends() -> dict[str, Case]:
    """What goes in, comes out and is the target."""
    found = {f"out: {name}": crossing(times, last) for name, last in OUTPUTS.items()}
    for name, (make, first) in INPUTS.items():
        x = lambda make=make: make(seven_rows().detach().requires_grad_())  # noqa: E731
        found[f"in: {name}"] = crossing(first, lambda w, x: w.sum() * x, x)
    for name, (make, loss_fn) in TARGETS.items():
        y = lambda make=make: make(seven_rows(requires_grad=False).flip(0))  # noqa: E731
        found[f"target: {name}"] = crossing(times, times, y=y, loss_fn=loss_fn)
    return found


VALUES = {name: crossing(*functions) for name, functions in BOUNDARIES.items()}
ENDS = ends()
