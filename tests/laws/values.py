"""Values of any nesting, and what makes and compares them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gpipe import GPipe

NUM_ROWS, CHUNKS = 7, 3


@dataclass
class State:
    """Not registered with pytree, as users' own dataclasses are not."""

    hidden: Tensor
    mask: Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Frozen:
    hidden: Tensor
    scale: float = 2.0


class Pair(NamedTuple):
    hidden: Tensor
    index: Tensor


class Do(nn.Module):
    """Calls a function with its weight, a vector, and what it is given."""

    def __init__(self, function: Callable[[Tensor, Any], Any], dtype=torch.float64) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=dtype))

    def forward(self, value: Any) -> Any:
        return self.function(self.weight, value)


def three_stages(first: nn.Module, last: nn.Module) -> nn.Sequential:
    return nn.Sequential(first, nn.Identity(), last)


def leaves(value: Any) -> list[Any]:
    """All that is in a value, dataclasses opened."""
    found = []
    for leaf in pytree.tree_leaves(value):
        if is_dataclass(leaf):
            found += leaves([getattr(leaf, each.name) for each in fields(leaf)])
        else:
            found.append(leaf)
    return found


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def loss_of(output: Any, _: Any = None) -> Tensor:
    """Something that every differentiable tensor in the output has a say in."""
    tensors = [leaf for leaf in leaves(output) if is_tensor(leaf)]
    return sum((t.abs() ** 2).sum() for t in tensors if t.is_floating_point() or t.is_complex())


def assert_same(mine: Any, other: Any) -> None:
    assert type(mine) is type(other)
    if is_tensor(mine):
        assert mine.requires_grad == other.requires_grad
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    else:
        assert mine == other


def inputs_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if is_tensor(leaf) and leaf.requires_grad]


def train(model: nn.Module, face: str, x: Any, target: Any, loss_fn: Callable) -> tuple:
    """Outputs and gradients of one mini-batch."""
    x = copy.deepcopy(x)
    if face == "step":
        output = model.step(x, target, loss_fn, loss_reduction="sum", return_output=True).output
    else:
        output = model(x)
        loss_fn(output, target).backward()
    gradients = [leaf.grad for leaf in (*model.parameters(), *inputs_of(x))]
    model.zero_grad()
    return output, gradients


def assert_as_plain(
    module: nn.Sequential,
    way: tuple[str, str, str],
    x: Any,
    target: Any = None,
    loss_fn: Callable = loss_of,
) -> None:
    """Two mini-batches through the pipeline equal one through the plain model, in all there is."""
    face, schedule, checkpoint = way
    expected, expected_gradients = train(module, "backward", x, target, loss_fn)
    model = GPipe(module, len(module), CHUNKS, schedule=schedule, checkpoint=checkpoint)
    for _ in range(2):
        output, gradients = train(model, face, x, target, loss_fn)
        assert pytree.tree_structure(output) == pytree.tree_structure(expected)
        for mine, other in zip(leaves(output), leaves(expected), strict=True):
            assert_same(mine, other.detach() if face == "step" and is_tensor(other) else other)
        for mine, other in zip(gradients, expected_gradients, strict=True):
            assert_same(mine, other)


def rows(requires_grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_ROWS, 6, dtype=torch.float64, generator=generator)
    return x.requires_grad_(requires_grad)
