"""The sign of life that each rank leaves in the store."""

import json
from typing import NamedTuple, Self

from torch._C._distributed_c10d import Store

__all__ = ["Beat", "Beats", "Neighbour"]


class Beat(NamedTuple):
    """One sign of life.

    Attributes:
        number: Differs from that of the beat before.
        has_left: Whether this was the last one, in good order.
        waits_for: What the rank waits for, if it waits.
        still_s: For how long it has waited for that.
    """

    number: int
    has_left: bool = False
    waits_for: str | None = None
    still_s: float = 0.0

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """What `to_json` has written."""
        return cls(*json.loads(text))

    def to_json(self) -> str:
        """All of it in one line of ASCII."""
        return json.dumps(self)


class Beats:
    """The beats of all ranks, through one connection to the store."""

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._begun: set[int] = set()
        self.others = [(rank + i) % num_ranks for i in range(1, num_ranks)]

    def write(self, beat: Beat) -> None:
        """Tell this rank's own."""
        self._store.set(f"beat/{self._rank}", beat.to_json())

    def read(self, rank: int) -> Beat | None:
        """The last one of a rank, None before its first."""
        key = f"beat/{rank}"
        if rank not in self._begun and not self._store.check([key]):
            return None  # `get` would wait for it
        self._begun.add(rank)
        return Beat.from_json(self._store.get(key))

    def read_others(self) -> dict[int, Beat | None]:
        """The last ones of all other ranks; costs as many look-ups, so not for every second."""
        return {rank: self.read(rank) for rank in self.others}


class Neighbour:
    """The next rank that has begun and not left, which this one listens to.

    Each listens to one, so that the store is asked as often as there are ranks, and not the square
    of it. Whoever dies has somebody who lives and listens, unless all die.
    """

    def __init__(self, beats: Beats) -> None:
        self._beats = beats
        self._left: set[int] = set()
        self._heard: tuple[int, Beat] | None = None
        self.silent_s = 0.0

    @property
    def rank(self) -> int | None:
        """Which one, None where there is nobody."""
        return self._heard[0] if self._heard else None

    def listen(self, elapsed_s: float) -> None:
        """Look for a new beat, so many seconds after the last look."""
        heard = self._next()
        is_silent = heard is not None and heard == self._heard
        self.silent_s = self.silent_s + elapsed_s if is_silent else 0.0
        self._heard = heard

    def _next(self) -> tuple[int, Beat] | None:
        for rank in self._beats.others:
            beat = None if rank in self._left else self._beats.read(rank)
            if beat is not None and not beat.has_left:
                return rank, beat
            if beat is not None:
                self._left.add(rank)
        return None
