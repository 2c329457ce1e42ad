"""All actions that differ in nothing but the micro-batch."""

from typing import NamedTuple

from gpipe.schedule.action import Action, Kind, Transfer

__all__ = ["Lane"]


class Lane(NamedTuple):
    """What actions have in common that differ in nothing but the micro-batch.

    Its length is the number of micro-batches at most, so that whatever holds for all of a lane is
    found out once and not for every action.
    """

    kind: Kind
    stage: int
    peer: int | None = None

    def action(self, microbatch: int) -> Action:
        """The action of this lane on a micro-batch."""
        if self.peer is None:
            return Action(self.kind, self.stage, microbatch)
        return Transfer(self.kind, self.stage, microbatch, self.peer)

    @property
    def ends(self) -> tuple[int, int] | None:
        """Where an activation on this way is stashed and popped; None if it leads nowhere.

        A gradient takes the way of its activation back.
        """
        if self.peer is None:
            return None
        is_at_stash = self.kind in (Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT)
        stash, pop = (self.stage, self.peer) if is_at_stash else (self.peer, self.stage)
        return (stash, pop) if stash < pop else None
