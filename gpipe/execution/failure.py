"""What the ranks tell each other about a failure."""

import json
import re
from contextlib import suppress
from typing import NamedTuple, Self

from torch import distributed as dist

from gpipe.errors import StageError

__all__ = ["Failure", "is_of_the_wire"]

_PLACE = re.compile(r"gpipe: (in stage (\d+), .*, micro-batch (\d+), (.*))", re.DOTALL)
_MOST_CHARACTERS = 4000  # of a message; it travels through the store
_OF_THE_WIRE = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|Timed out waiting", re.IGNORECASE
)


class Failure(NamedTuple):
    """How a rank has failed.

    Attributes:
        rank: Which one; None for the store, through which the ranks find each other.
        error: Class and message of the exception: "ValueError: message".
        where: "in stage 1, layer 3 ('3', Linear), micro-batch 0, forward", or nothing.
        stage: The stage in which it failed, where that is known.
        microbatch: The micro-batch with which it failed, where that is known.
        action: What the stage was doing, where that is known.
    """

    rank: int | None
    error: str
    where: str = ""
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Self:
        """The failure of a rank by an exception, whose notes say where it was."""
        message = _message(error)
        for note in getattr(error, "__notes__", ()):
            if found := _PLACE.match(note):
                where, stage, microbatch, action = found.groups()
                return cls(rank, message, where, int(stage), int(microbatch), action)
        return cls(rank, message)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` has written."""
        return cls(*json.loads(text))

    def to_json(self) -> str:
        """All of it in one line of ASCII."""
        return json.dumps(self)

    def __str__(self) -> str:
        who = "The store" if self.rank is None else f"Rank {self.rank}"
        return f"{who} failed first{self.where and ' '}{self.where}: {self.error}"

    def as_error(self) -> StageError:
        """What the other ranks raise."""
        remedy = "" if self.rank is None else f"\nLook at the output of rank {self.rank}."
        return StageError(f"{self}{remedy}", self.rank)


def is_of_the_wire(error: BaseException) -> bool:
    """Whether a broken or silent connection was noticed: most often another rank has ended."""
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and bool(_OF_THE_WIRE.search(_message(error)))


def _message(error: BaseException) -> str:
    text = type(error).__name__
    with suppress(Exception):  # the text of an error may fail in ways of its own
        text += f": {error}"
    return text.removesuffix(": ")[:_MOST_CHARACTERS]
