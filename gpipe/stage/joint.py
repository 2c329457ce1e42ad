"""A boundary and the skips beside it, as one boundary."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpipe.stage.boundary import Boundary, Gradients, pack, unpack
from gpipe.stage.passage import How, Through
from gpipe.stage.skip import SkipKey, SkipStore, using

__all__ = [
    "Skips",
    "join_skips",
    "part_gradients",
    "part_skips",
    "with_own_store",
    "with_skips",
]

Skips = Mapping[SkipKey, Boundary]


class _Part(NamedTuple):
    """The piece of a joint boundary that belongs to the boundary itself (no key) or to a skip."""

    key: SkipKey | None
    structure: Any
    num_tensors: int


class _Parts(tuple[_Part, ...]):
    """Stands as the structure of a joint boundary."""


def join_skips(boundary: Boundary, skips: Skips) -> Boundary:
    """One boundary with the tensors of all, so that whoever holds it need not know of skips."""
    named = [(None, boundary), *skips.items()]
    parts = _Parts(_Part(key, each.structure, len(each.tensors)) for key, each in named)
    return Boundary([tensor for _, each in named for tensor in each.tensors], parts)


def part_skips(joint: Boundary) -> tuple[Boundary, dict[SkipKey, Boundary]]:
    """What `join_skips` was given."""
    (_, main), *skips = [
        (part.key, Boundary(tensors, part.structure))
        for part, tensors in _cut(joint.structure, joint.tensors)
    ]
    return main, {key: boundary for key, boundary in skips if key is not None}


def part_gradients(joint: Any, gradients: Gradients) -> tuple[Gradients, dict[SkipKey, Gradients]]:
    """The gradients of a joint boundary with this structure: the boundary's, and the skips'."""
    (_, main), *skips = [(part.key, piece) for part, piece in _cut(joint, gradients)]
    return main, {key: piece for key, piece in skips if key is not None}


def with_skips(through: Through) -> Through:
    """Let the layers find the skips of a joint boundary, and join what they leave."""

    def wrapped(microbatch: int, joint: Boundary, how: How) -> Boundary:
        boundary, skips = part_skips(joint)
        store = SkipStore({key: unpack(skip) for key, skip in skips.items()})
        with using(store):
            output = through(microbatch, boundary, how)
        return join_skips(output, {key: pack(skip) for key, skip in store.left().items()})

    return wrapped


def _cut(parts: _Parts, items: Sequence[Any]) -> list[tuple[_Part, list[Any]]]:
    cut, start = [], 0
    for part in parts:
        cut.append((part, list(items[start : start + part.num_tensors])))
        start += part.num_tensors
    return cut


def with_own_store(through: Through) -> Through:
    """Let skips that stay inside the stage live no longer than the action, even if it fails."""

    def wrapped(microbatch: int, inputs: Boundary, how: How) -> Boundary:
        with using(SkipStore()):
            return through(microbatch, inputs, how)

    return wrapped
