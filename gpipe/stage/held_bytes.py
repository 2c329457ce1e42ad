"""How much memory micro-batches hold between their forwards and their backwards."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

__all__ = ["held_bytes"]


def held_bytes(tensors: Iterable[Tensor], edges: Iterable[GradientEdge | Tensor]) -> int:
    """The bytes of these tensors, and of all that the graphs behind these edges have saved.

    Each storage counts once. Parameters are left out, which are there anyway, and what hooks have
    packed away. The engine never asks this; it is for the message about a failure.
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
        # Not what torch unpacks: that would call hooks, which may compute, or move everything back.
        if name.startswith("_raw_saved_"):
            value = getattr(node, name)
            for each in value if isinstance(value, tuple | list) else [value]:
                if each is not None and each.unpack_hook is None:
                    data = each.data
                    yield from [data] if isinstance(data, Tensor) else []
