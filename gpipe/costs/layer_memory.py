"""What each layer saves and passes on, storage by storage."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gpipe.arguments import require_count
from gpipe.costs.number import Numbers, require_number
from gpipe.costs.size import BoundaryTensor, Size, Skip

__all__ = ["LayerMemory"]


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """The storages of a model's activations, numbered through all layers.

    One that several layers of a stage save, view or write into is there once. Lists are taken, too,
    and become tuples.

    Attributes:
        storages: How large each is.
        saved: The storages that autograd saves in each layer, those of parameters, buffers and
            constants left out.
        written: The storages of its input that each layer writes into.
        boundaries: The sample's tensors, then those that each layer returns: one more than layers.
        skips: What jumps over layers.

    Raises:
        TypeError: Something has another structure.
        ValueError: There are too many or too few entries, or a storage or a layer is unknown.
    """

    storages: tuple[Size, ...]
    saved: tuple[tuple[int, ...], ...]
    written: tuple[tuple[int, ...], ...]
    boundaries: tuple[tuple[BoundaryTensor, ...], ...]
    skips: tuple[Skip, ...] = ()

    def __post_init__(self) -> None:
        self._set("storages", tuple(Size(*size) for size in self.storages))
        self._set("saved", tuple(map(tuple, self.saved)))
        self._set("written", tuple(map(tuple, self.written)))
        self._set("boundaries", tuple(map(_tensors, self.boundaries)))
        self._set("skips", tuple(_skip(*skip) for skip in self.skips))
        self._require_lengths()
        self._require_sizes()
        self._require_storages()
        self._require_skips()

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.saved)

    @cached_property
    def saved_sizes(self) -> tuple[Size, ...]:
        """What each layer is the first to save: added up, what the whole model saves."""
        return tuple(map(self._total, _without_earlier(self.saved)))

    @property
    def saved_bytes_per_row(self) -> Numbers:
        """What each layer is the first to save of a row, without fixed parts."""
        return tuple(size.bytes_per_row for size in self.saved_sizes)

    @property
    def output_bytes_per_row(self) -> Numbers:
        """What each layer returns of a row, without fixed parts and skips."""
        outputs = self.boundaries[1:]
        return tuple(sum(tensor.size.bytes_per_row for tensor in output) for output in outputs)

    def input_bytes(self, stage: range, rows: int) -> float:
        """What a stage of these layers receives, skips among it."""
        return _bytes_at(list(self._input(stage)), rows)

    def output_bytes(self, stage: range, rows: int) -> float:
        """What a stage of these layers returns, skips left out."""
        return _bytes_at(self.boundaries[stage.stop], rows)

    def inside_bytes(self, stage: range, rows: int) -> float:
        """What the layers of a stage save, its input left out."""
        received = {tensor.storage: tensor.size for tensor in self._input(stage)}
        saved = {storage for layer in stage for storage in self.saved[layer]}
        written = {storage for layer in stage for storage in self.written[layer]}
        made = [self.storages[storage] for storage in saved - received.keys()]
        if written & received.keys():
            # A stage that writes into its input works on a copy beside it, and saves the copy.
            made += [received[storage] for storage in saved & received.keys()]
        return sum(size.at(rows) for size in made)

    def skip_bytes(self, stages: Sequence[range], rows: int) -> dict[tuple[int, int], float]:
        """What jumps from one stage to another, by the two."""
        stage_of = {layer: index for index, stage in enumerate(stages) for layer in stage}
        skip_bytes: dict[tuple[int, int], float] = {}
        for skip in self.skips:
            edge = stage_of[skip.stash_layer], stage_of[skip.pop_layer]
            if edge[0] != edge[1]:
                skip_bytes[edge] = skip_bytes.get(edge, 0) + _bytes_at(skip.tensors, rows)
        return skip_bytes

    def _input(self, stage: range) -> Iterator[BoundaryTensor]:
        yield from self.boundaries[stage.start]
        for skip in self.skips:
            if skip.stash_layer < stage.start and skip.pop_layer in stage:
                yield from skip.tensors

    def _total(self, storages: Collection[int]) -> Size:
        sizes = [self.storages[storage] for storage in storages]
        return Size(
            sum(size.fixed_bytes for size in sizes), sum(size.bytes_per_row for size in sizes)
        )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _require_lengths(self) -> None:
        require_count("num_layers", self.num_layers)
        for name, more in (("written", 0), ("boundaries", 1)):
            found, wanted = len(getattr(self, name)), self.num_layers + more
            if found != wanted:
                raise ValueError(
                    f"`{name}` has {found} entries for {self.num_layers} layers. Give {wanted}."
                )

    def _require_sizes(self) -> None:
        tensors = [tensor for tensors in self._all_tensors() for tensor in tensors]
        for size in (*self.storages, *(tensor.size for tensor in tensors)):
            require_number("fixed_bytes", size.fixed_bytes)
            require_number("bytes_per_row", size.bytes_per_row)

    def _require_storages(self) -> None:
        used = {storage for row in (*self.saved, *self.written) for storage in row}
        tensors = [tensor for tensors in self._all_tensors() for tensor in tensors]
        used |= {tensor.storage for tensor in tensors if tensor.storage is not None}
        unknown = used - set(range(len(self.storages)))
        if unknown:
            raise ValueError(
                f"Storages {sorted(unknown)} are named, and there are {len(self.storages)}, "
                "counted from 0. Give the size of each."
            )

    def _require_skips(self) -> None:
        for name, stash_layer, pop_layer, _ in self.skips:
            if not 0 <= stash_layer < pop_layer < self.num_layers:
                raise ValueError(
                    f"Skip {name!r} goes from layer {stash_layer} to layer {pop_layer} of "
                    f"{self.num_layers}. Name a layer, counted from 0, and a later one."
                )

    def _all_tensors(self) -> Iterator[tuple[BoundaryTensor, ...]]:
        yield from self.boundaries
        yield from (skip.tensors for skip in self.skips)


def _tensors(entries: Sequence[Any]) -> tuple[BoundaryTensor, ...]:
    return tuple(BoundaryTensor(storage, Size(*size)) for storage, size in entries)


def _skip(name: str, stash_layer: int, pop_layer: int, tensors: Sequence[Any]) -> Skip:
    return Skip(name, stash_layer, pop_layer, _tensors(tensors))


def _bytes_at(tensors: Sequence[BoundaryTensor], rows: int) -> float:
    return sum(tensor.size.at(rows) for tensor in tensors)


def _without_earlier(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each row without what an earlier one has."""
    seen: set[int] = set()
    new = []
    for row in rows:
        new.append([item for item in row if item not in seen])
        seen.update(row)
    return new
