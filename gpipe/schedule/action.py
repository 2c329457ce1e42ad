"""One step of one worker."""

from enum import StrEnum
from typing import NamedTuple

__all__ = ["Action", "Kind"]


class Kind(StrEnum):
    """What an action does; the value is its letter in every drawing."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"

    # Enum hashes by name, in Python code. Actions are keys of every set and dict here, and a
    # member equals its letter: the hash of the letter is both faster and the consistent one.
    __hash__ = str.__hash__


class Action(NamedTuple):
    """One step of one worker: `kind` of `stage` on `microbatch`, both counted from 0.

    `str(action)` is the notation of all drawings and messages: letter, stage, dot, micro-batch.
    `B2.0` is the backward of stage 2 on micro-batch 0.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"
