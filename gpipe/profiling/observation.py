"""Sees which storages a forward saves, writes into and returns."""

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe.profiling.attempt import Attempt
from gpipe.stage.dense_parts import dense_parts

__all__ = ["Observation", "StorageMark", "observe", "parts_of"]


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

    Inputs and outputs are the dense parts of tensors: of most there is one, of a sparse one there
    are its indices and its values.

    Attributes:
        inputs: The storage of each input.
        saved: The storages that autograd holds when the forward is over.
        written: The positions of inputs that were written into.
        outputs: The storage of each output.
        output_bytes: The bytes of each output, which its storage may exceed.
    """

    inputs: list[StorageMark]
    saved: list[StorageMark]
    written: list[int]
    outputs: list[StorageMark]
    output_bytes: list[int]


def observe(attempt: Attempt) -> Observation:
    """Run the forward of an attempt, and see."""
    given = parts_of(attempt.inputs)
    inputs, versions = list(map(_mark, given)), _versions(given)
    seen: list[tuple[StorageMark, weakref.ref[Tensor]]] = []

    def see(tensor: Tensor) -> Tensor:
        saved = tensor.detach()  # an output that a node saves must not refer to that node
        seen.extend((_mark(part), weakref.ref(saved)) for part in parts_of([tensor]))
        return saved

    with saved_tensors_hooks(see, lambda tensor: tensor):
        attempt.forward()
    outputs = parts_of(attempt.outputs().tensors)
    changes = zip(versions, _versions(given), strict=True)
    # What a part of the graph saved that is gone again is not held.
    saved = {mark.key: mark for mark, reference in seen if reference() is not None}
    return Observation(
        inputs,
        list(saved.values()),
        [position for position, (before, after) in enumerate(changes) if before != after],
        list(map(_mark, outputs)),
        [part.nbytes for part in outputs],
    )


def parts_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The dense parts of tensors of any layout."""
    return [part for tensor in tensors for part in dense_parts(tensor)]


def _mark(tensor: Tensor) -> StorageMark:
    storage = tensor.untyped_storage()
    life = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    return StorageMark(storage._cdata, storage.nbytes(), life)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]
