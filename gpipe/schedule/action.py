"""One step of one worker."""

from enum import StrEnum
from typing import NamedTuple

__all__ = ["RECEIVE_OF", "SEND_OF", "Action", "Kind", "Transfer"]


class Kind(StrEnum):
    """What an action does; the value is its letter in every drawing."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    SEND_ACTIVATION = "A>"
    RECEIVE_ACTIVATION = "A<"
    SEND_GRADIENT = "G>"
    RECEIVE_GRADIENT = "G<"

    # Enum hashes by name, in Python code. Actions are keys of every set and dict here, and a
    # member equals its letter: the hash of the letter is both faster and the consistent one.
    __hash__ = str.__hash__


RECEIVE_OF = {
    Kind.SEND_ACTIVATION: Kind.RECEIVE_ACTIVATION,
    Kind.SEND_GRADIENT: Kind.RECEIVE_GRADIENT,
}
"""What stands at the other end of each kind of send."""

SEND_OF = {receive: send for send, receive in RECEIVE_OF.items()}
"""What stands at the other end of each kind of receive."""


class Action(NamedTuple):
    """One step of one worker: `kind` of `stage` on `microbatch`, both counted from 0.

    `str(action)` is the notation of all drawings and messages: letter, stage, dot, micro-batch.
    `B2.0` is the backward of stage 2 on micro-batch 0.
    """

    kind: Kind
    stage: int
    microbatch: int

    @property
    def peer(self) -> int | None:
        """The stage at the other end of a transfer; None for everything else."""
        return None

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


class Transfer(Action):
    """One end of a transfer: `stage` sends to `peer`, or receives from it.

    The text names both ends and points where the data goes: `A0>1.3` sends the activation of
    micro-batch 3 from stage 0 to stage 1, `A1<0.3` receives it there; `G1>0.3` and `G0<1.3` are
    those of its gradient. A transfer between stages that are no neighbours carries a skip.

    Args:
        kind: One of the four kinds of sends and receives.
        stage: The stage of this end.
        microbatch: Whose data it is.
        peer: The stage of the other end.
    """

    # It extends the tuple by one item, and computing actions stay the three that most code unpacks.
    __slots__ = ()

    def __new__(cls, kind: Kind, stage: int, microbatch: int, peer: int) -> "Transfer":  # noqa: D102 - the class says it
        return tuple.__new__(cls, (kind, stage, microbatch, peer))

    @property
    def peer(self) -> int:
        """The stage at the other end."""
        return self[3]  # type: ignore[misc,no-any-return]

    @property
    def partner(self) -> "Transfer":
        """The other end: the receive of a send, the send of a receive."""
        kind = RECEIVE_OF.get(self.kind) or SEND_OF[self.kind]
        return Transfer(kind, self.peer, self.microbatch, self.stage)

    def __str__(self) -> str:
        letter, arrow = self.kind
        return f"{letter}{self.stage}{arrow}{self.peer}.{self.microbatch}"

    def __repr__(self) -> str:
        return f"Transfer({self.kind!r}, {self.stage}, {self.microbatch}, {self.peer})"
