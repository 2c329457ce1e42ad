"""Lets a recompute start from the buffers that its forward started from."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Buffer", "Copies", "all_buffers", "changed_since", "copies_of", "marks_of", "replaced"]


class Buffer(NamedTuple):
    """The place of a buffer: a module and the name in it."""

    module: nn.Module
    name: str

    @property
    def value(self) -> Tensor | None:
        """What is there now."""
        return self.module._buffers.get(self.name)

    @property
    def mark(self) -> tuple[int, int]:
        """Changes when another tensor is put here, or this one written to so that torch sees it."""
        value = self.value
        return id(value), -1 if value is None or value.is_inference() else value._version


Copies = list[tuple[Buffer, Tensor | None]]
"""Buffers with what was in them."""


def all_buffers(layers: Iterable[nn.Module]) -> list[Buffer]:
    """The buffers of the layers, nested ones too."""
    modules = (module for layer in layers for module in layer.modules())
    return [Buffer(module, name) for module in modules for name in module._buffers]


@torch.no_grad()
def copies_of(buffers: Iterable[Buffer]) -> Copies:
    """What is in the buffers now, to be kept."""
    return [(buffer, None if buffer.value is None else buffer.value.clone()) for buffer in buffers]


def marks_of(buffers: Iterable[Buffer]) -> list[tuple[Buffer, tuple[int, int]]]:
    """What tells cheaply, though not in every case, that a buffer has changed."""
    return [(buffer, buffer.mark) for buffer in buffers]


def changed_since(copies: Copies) -> set[Buffer]:
    """The buffers that hold something else than then.

    Values are compared, not version counters: batch normalisation writes past the counter.
    """
    return {buffer for buffer, before in copies if not _equal(buffer.value, before)}


@contextmanager
def replaced(copies: Copies) -> Iterator[None]:
    """Let the modules find the copies meanwhile, and afterwards their own buffers, untouched.

    The objects are exchanged, not the values: a graph may have saved the buffer itself.
    """
    now = [buffer.value for buffer, _ in copies]
    try:
        for buffer, before in copies:
            buffer.module._buffers[buffer.name] = before
        yield
    finally:
        for (buffer, _), value in zip(copies, now, strict=True):
            buffer.module._buffers[buffer.name] = value


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and bool(torch.equal(a, b))
