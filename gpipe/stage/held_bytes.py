"""How much memory micro-batches hold between their forwards and their backwards."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

__all__ = ["held_bytes"]


def held_bytes(tensors: Iterable[Tensor], edges: Iterable[GradientEdge | Tensor]) -> int:
    """The bytes of these tensors, and of all that the graphs behind these edges have saved.

    Each storage counts once. The engine never asks this; it is for the message about a failure.
    Parameters are left out: they are there anyway.
    """
    saved = (each for node in _nodes(edges) for each in _saved(node))
    storages = {}
    for tensor in (*tensors, *saved):
        if tensor.layout == torch.strided and not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
    return sum(storage.nbytes() for storage in storages.values())


def _nodes(edges: Iterable[GradientEdge | Tensor]) -> Iterator[Node]:
    first = [edge.grad_fn if isinstance(edge, Tensor) else edge.node for edge in edges]
    waiting, seen = [node for node in first if node is not None], set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [each for each, _ in node.next_functions if each is not None]


def _saved(node: Any) -> Iterator[Tensor]:
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            # What was freed, or is changed by then, refuses to be looked at.
            with suppress(RuntimeError, AttributeError):
                value = getattr(node, name)
                each = value if isinstance(value, tuple | list) else [value]
                yield from (item for item in each if isinstance(item, Tensor))
