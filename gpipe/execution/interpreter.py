"""Carries out one row of a schedule, action by action."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from gpipe.execution.channel import Channel
from gpipe.schedule import Action, Kind
from gpipe.timeline import Event

__all__ = ["Performers", "interpret"]

Performers = Mapping[tuple[Kind, int], Callable[[int, Any], Any]]
"""What carries out a kind of action on a stage: (micro-batch, received) -> sent, or None."""


def interpret(
    worker: int,
    row: Sequence[Action],
    performers: Performers,
    channel: Channel,
    events: list[Event],
) -> None:
    """Receive, perform and send for each action in turn.

    Args:
        worker: Whose row this is; it stands in the events.
        row: The actions, in the order in which they are done.
        performers: Does the work; this function knows nothing of tensors.
        channel: Where an action's input comes from, and where its result goes.
        events: Gets the start and end of each action, waiting excluded.
    """
    for action in row:
        kind, stage, microbatch = action
        received = channel.receive(action)
        start_s = perf_counter()
        result = performers[kind, stage](microbatch, received)
        events.append(Event(worker, action, start_s, perf_counter()))
        if result is not None:
            channel.send(action, result)
        # While this worker waits for its next action it must not keep the last one's tensors alive.
        del received, result
