"""Passes: from one schedule to the next."""

from collections.abc import Iterator
from dataclasses import replace

from gpipe.arguments import require_choice
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.schedule import Schedule

__all__ = ["RECOMPUTE_MODES", "add_recompute"]

RECOMPUTE_MODES = ("always", "except_last", "never")


def add_recompute(schedule: Schedule, mode: str) -> Schedule:
    """Puts a recompute directly before each backward whose activations are dropped.

    It is an action of its own, not a part of the backward, so that it runs while the gradient is
    still on its way. Two stages, two micro-batches of fill-drain, "always":

        worker 0  F0.0 F0.1 R0.1  .    .   B0.1 R0.0 B0.0
        worker 1   .   F1.0 F1.1 R1.1 B1.1 R1.0 B1.0  .

    Args:
        schedule: Stays as it is. What it recomputes already keeps its place.
        mode: "always"; "except_last": not where the backward stands right after its own forward
            in the row, since there nothing is gained by dropping; "never".

    Returns:
        A schedule with the same rows otherwise.

    Raises:
        TypeError: `mode` is no string.
        ValueError: `mode` is unknown; the message names the nearest.
    """
    require_choice("mode", mode, RECOMPUTE_MODES)
    if mode == "never":
        return schedule
    rows = tuple(tuple(_recomputing(row, schedule, mode)) for row in schedule.rows)
    return replace(schedule, rows=rows)


def _recomputing(row: tuple[Action, ...], schedule: Schedule, mode: str) -> Iterator[Action]:
    before: Action | None = None
    transfers: list[Action] = []  # those behind `before`
    for action in row:
        if action.peer is not None:
            transfers.append(action)
            continue
        kind, stage, microbatch = action
        is_kept = mode == "except_last" and before == (Kind.FORWARD, stage, microbatch)
        is_done = kind is not Kind.BACKWARD or (stage, microbatch) in schedule.recomputed
        if not is_kept and not is_done:
            recompute = Action(Kind.RECOMPUTE, stage, microbatch)
            transfers.insert(_wait_for_gradient(action, transfers), recompute)
        yield from transfers
        yield action
        before = action
        transfers.clear()
    yield from transfers


def _wait_for_gradient(backward: Action, transfers: list[Action]) -> int:
    """The first place at which a gradient for `backward` is received; the end, if none is."""
    wanted = (Kind.RECEIVE_GRADIENT, *backward[1:])
    places = (place for place, each in enumerate(transfers) if each[:3] == wanted)
    return next(places, len(transfers))
