"""Sees which storages a forward saves, writes into and returns."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe.profiling.attempt import Attempt

__all__ = ["Observation", "StorageMark", "observe"]


class StorageMark(NamedTuple):
    """A storage, which it does not keep alive.

    Attributes:
        key: Tells it from others; no other one gets the key while this mark is there.
        num_bytes: Its size.
        life: The weak reference that sees to both.
    """

    key: int
    num_bytes: int
    life: StorageWeakRef


class Observation(NamedTuple):
    """What one forward of one layer did with memory.

    Attributes:
        inputs: The storage of each input; None where it has none of its own kind.
        saved: The storages that autograd holds when the forward is over.
        written: The positions of inputs that were written into.
        outputs: The storage of each output.
        output_bytes: The bytes of each output, which its storage may exceed.
    """

    inputs: list[StorageMark | None]
    saved: list[StorageMark]
    written: list[int]
    outputs: list[StorageMark | None]
    output_bytes: list[int]


def observe(attempt: Attempt) -> Observation:
    """Run the forward of an attempt, and see."""
    inputs = [_mark(tensor) for tensor in attempt.inputs]
    versions = _versions(attempt.inputs)
    seen: list[tuple[StorageMark, weakref.ref[Tensor]]] = []

    def see(tensor: Tensor) -> Tensor:
        mark = _mark(tensor)
        saved = tensor.detach()  # an output that a node saves must not refer to that node
        if mark is not None:
            seen.append((mark, weakref.ref(saved)))
        return saved

    with saved_tensors_hooks(see, lambda tensor: tensor):
        attempt.forward()
    outputs = attempt.outputs().tensors
    changes = zip(versions, _versions(attempt.inputs), strict=True)
    # What a part of the graph saved that is gone again is not held.
    saved = {mark.key: mark for mark, reference in seen if reference() is not None}
    return Observation(
        inputs,
        list(saved.values()),
        [position for position, (before, after) in enumerate(changes) if before != after],
        [_mark(tensor) for tensor in outputs],
        [tensor.nbytes for tensor in outputs],
    )


def _mark(tensor: Tensor) -> StorageMark | None:
    if tensor.layout != torch.strided:
        return None
    storage = tensor.untyped_storage()
    life = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    return StorageMark(storage._cdata, storage.nbytes(), life)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]
