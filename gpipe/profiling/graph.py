"""Looks into the graph that a forward has made."""

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointFunction

__all__ = ["has_reentrant_checkpoint"]


def has_reentrant_checkpoint(roots: Iterable[Tensor]) -> bool:
    """Whether there is a checkpoint that refuses to be asked for the gradients of some leaves."""
    return any(
        getattr(type(node), "_forward_cls", None) is CheckpointFunction for node in _nodes(roots)
    )


def _nodes(roots: Iterable[Tensor]) -> Iterator[Node]:
    waiting = [root.grad_fn for root in roots]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [each for each, _ in node.next_functions]
