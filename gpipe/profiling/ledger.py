"""Adds the traces of all layers up to one numbering."""

from collections.abc import Iterable, Sequence

from gpipe.costs import BoundaryTensor, LayerMemory, Size, Skip
from gpipe.costs.size import line_through
from gpipe.profiling.observation import parts_of
from gpipe.profiling.trace import Trace
from gpipe.stage.boundary import Boundary
from gpipe.stage.joint import part_skips
from gpipe.stage.skip import SkipKey

__all__ = ["Ledger"]

Tensors = tuple[BoundaryTensor, ...]


class Ledger:
    """Knows which storage each tensor between two layers lies in, and how large it is.

    Args:
        samples: The sample with all rows, and with fewer.
        rows: The number of rows of both.
    """

    def __init__(self, samples: Sequence[Boundary], rows: tuple[int, int]) -> None:
        self._rows = rows
        self._storages: list[Size] = []
        self._saved: list[tuple[int, ...]] = []
        self._written: list[tuple[int, ...]] = []
        self._waiting: dict[SkipKey, tuple[int, Tensors]] = {}
        self._skips: list[Skip] = []
        columns = zip(*map(_bytes_of, samples), strict=True)
        self._boundaries = [tuple(self._received(*pair) for pair in columns)]

    def same(self, pops: Sequence[SkipKey]) -> list[int | None]:
        """For each input of the next layer the first one in its storage; None: no activation.

        Args:
            pops: The skips that the layer pops, which follow its other inputs.
        """
        storages = [tensor.storage for tensor in self._inputs(pops)]
        return [None if storage is None else storages.index(storage) for storage in storages]

    def add(self, traces: Sequence[Trace], outputs: Boundary, pops: Sequence[SkipKey]) -> None:
        """Take in the next layer.

        Args:
            traces: With all rows, and with fewer.
            outputs: What the layer gave, with the skips that it stashed.
            pops: The skips that it pops.
        """
        full, fewer = traces
        if not fewer.resembles(full):
            # It does something else with fewer rows, which says nothing of the sizes.
            fewer = full.scaled(self._rows[1] / self._rows[0])
        numbers = self._numbers_of(full, fewer, pops)
        layer = len(self._saved)
        self._saved.append(tuple(_known(numbers[item] for item in full.saved)))
        self._written.append(tuple(_known(numbers[item] for item in full.written)))
        for key in pops:
            stash_layer, tensors = self._waiting.pop(key)
            self._skips.append(Skip(key.name, stash_layer, layer, tensors))
        self._put(self._outputs(full, fewer, numbers), outputs)

    def memory(self) -> LayerMemory:
        """All that was taken in."""
        return LayerMemory(
            storages=tuple(self._storages),
            saved=tuple(self._saved),
            written=tuple(self._written),
            boundaries=tuple(self._boundaries),
            skips=tuple(self._skips),
        )

    def _inputs(self, pops: Sequence[SkipKey]) -> Tensors:
        popped = [tensor for key in pops for tensor in self._waiting[key][1]]
        return *self._boundaries[-1], *popped

    def _numbers_of(self, full: Trace, fewer: Trace, pops: Sequence[SkipKey]) -> list[int | None]:
        """The model's number for each of the layer's."""
        numbers = [tensor.storage for tensor in self._inputs(pops)]
        for pair in zip(full.made_bytes, fewer.made_bytes, strict=True):
            numbers.append(len(self._storages))
            self._storages.append(self._size(*pair))
        return numbers

    def _outputs(
        self, full: Trace, fewer: Trace, numbers: Sequence[int | None]
    ) -> list[BoundaryTensor]:
        sizes = map(self._size, full.output_bytes, fewer.output_bytes)
        return [
            BoundaryTensor(None if item is None else numbers[item], size)
            for item, size in zip(full.outputs, sizes, strict=True)
        ]

    def _put(self, tensors: Sequence[BoundaryTensor], outputs: Boundary) -> None:
        """Sort what passes to the next layer from what jumps."""
        boundary, stashed = part_skips(outputs)
        end = len(parts_of(boundary.tensors))
        self._boundaries.append(tuple(tensors[:end]))
        for key, skip in stashed.items():
            start, end = end, end + len(parts_of(skip.tensors))
            self._waiting[key] = len(self._saved) - 1, tuple(tensors[start:end])

    def _received(self, full_bytes: float, fewer_bytes: float) -> BoundaryTensor:
        self._storages.append(self._size(full_bytes, fewer_bytes))
        return BoundaryTensor(len(self._storages) - 1, self._storages[-1])

    def _size(self, full_bytes: float, fewer_bytes: float) -> Size:
        return Size(*line_through(full_bytes, fewer_bytes, *self._rows))


def _bytes_of(boundary: Boundary) -> list[int]:
    return [part.nbytes for part in parts_of(boundary.tensors)]


def _known(numbers: Iterable[int | None]) -> list[int]:
    return [number for number in numbers if number is not None]
