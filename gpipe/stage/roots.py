"""Where a stage's backward begins."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.variable import Variable

from gpipe.stage.boundary import Boundary, Gradients
from gpipe.stage.device import HOST

__all__ = ["Root", "differentiate", "roots_of"]

_PythonNode = torch._C._FunctionBase
_run_backward = Variable._execution_engine.run_backward


class Root(NamedTuple):
    """The place of an output in the graph, without its memory if only the next stage needs that."""

    edge: GradientEdge | Tensor
    device: torch.device


def roots_of(outputs: Boundary, *, keeps_memory: bool = False) -> list[Root | None]:
    """A root for each output; None where it has no graph.

    Args:
        outputs: Those of a stage, or its losses.
        keeps_memory: Whether they may live as long as the roots: that takes less time.
    """
    if keeps_memory:
        return [
            Root(tensor, tensor.device) if tensor.requires_grad else None
            for tensor in outputs.tensors
        ]
    return [_root(tensor) for tensor in outputs.tensors]


def differentiate(roots: list[Root | None], gradients: Gradients) -> None:
    """Run the backward from these roots; each leaf adds its gradient to its `.grad`.

    Args:
        roots: Those of a stage's outputs.
        gradients: One for each, None where there is none.
    """
    edges, seeds = [], []
    for root, gradient in zip(roots, gradients, strict=True):
        if gradient is not None and root is not None:
            edges.append(root.edge)
            seeds.append(gradient if gradient.device == root.device else gradient.to(root.device))
    if edges:
        # `torch.autograd.backward` without its checks of what we made ourselves: they cost as much
        # as the backward of a small layer (15 of 43 microseconds). The last two: unreachable
        # inputs are fine, and leaves keep their gradients.
        try:
            _run_backward(tuple(edges), tuple(seeds), False, False, (), True, True)
        except BaseException:
            _clear_engine()
            raise


def _clear_engine() -> None:
    """Let go of what a failed backward has left in the engine's queue of this thread.

    It would keep activations alive until the thread's next backward; and a thread that ends with
    it, at the exit of the interpreter, takes the process down.
    """
    with torch.enable_grad():
        token = torch.zeros((), device=HOST, requires_grad=True)
    _run_backward((token,), (torch.ones((), device=HOST),), False, False, (), True, True)


def _root(tensor: Tensor) -> Root | None:
    if not tensor.requires_grad:
        return None
    if tensor.layout != torch.strided:  # torch finds the edge by a view, which these have not
        return Root(tensor, tensor.device)
    node = tensor.grad_fn
    if node is None or isinstance(node, _PythonNode):  # torch's own way for leaves and Functions
        return Root(get_gradient_edge(tensor), tensor.device)
    return Root(GradientEdge(node, tensor.output_nr), tensor.device)
