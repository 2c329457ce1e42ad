"""When everything would happen that a fake world has recorded, if it took time."""

from collections.abc import Mapping
from typing import Any

from tests.streams.fakes import World

__all__ = ["replay"]


def replay(world: World, duration_s: Mapping[Any, float], between_s: float) -> dict[Any, float]:
    """The time of each mark in the log of the world.

    What a stream holds is done in order, each part as soon as the one before it and what it waits
    for are done. The log is in the order in which the host enqueued, so that whatever is waited for
    stands before.

    Args:
        world: Its log.
        duration_s: For each mark at the end of an action, how long the action takes.
        between_s: How long each copy between stages takes; one from the host takes no time.
    """
    now_s: dict[Any, float] = {}
    events_s: dict[Any, float] = {}
    marks_s: dict[Any, float] = {}
    for what, stream, other in world.log:
        if what == "record":
            events_s[other] = now_s.get(stream, 0.0)
        elif what == "wait":
            now_s[stream] = max(now_s.get(stream, 0.0), events_s[other])
        elif what == "copy":  # both streams are busy with it
            transfer_s = 0.0 if other.kind == "inputs in" else between_s
            end_s = max(now_s.get(stream, 0.0), now_s.get(other, 0.0)) + transfer_s
            now_s[stream] = now_s[other] = end_s
        else:
            now_s[stream] = now_s.get(stream, 0.0) + duration_s.get(other, 0.0)
            marks_s[other] = now_s[stream]
    return marks_s
