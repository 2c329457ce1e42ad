"""The pass that adds the transfers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpipe.schedule.action import RECEIVE_OF, Action, Kind, Transfer
from gpipe.schedule.clock import Times, clock, kind_durations
from gpipe.schedule.collector import paused_collector
from gpipe.schedule.graph import Graph, graph_of
from gpipe.schedule.lane import Lane
from gpipe.schedule.order import Order, run
from gpipe.schedule.refusal import deadlock
from gpipe.schedule.schedule import Schedule

__all__ = ["add_transfers", "merge_transfers"]

# Those of the run whose order the transfers take: the usual proportions.
DURATIONS = {Kind.FORWARD: 1, Kind.RECOMPUTE: 1, Kind.BACKWARD: 2}

SENDS = {Kind.FORWARD: Kind.SEND_ACTIVATION, Kind.BACKWARD: Kind.SEND_GRADIENT}

Skips = Iterable[tuple[int, int]]


@paused_collector()
def add_transfers(schedule: Schedule, skips: Skips = ()) -> Schedule:
    """Puts a send and a receive wherever data goes from one worker to another.

    Each transfer takes the place of the moment at which what it carries was made in a run of the
    schedule, with a backward twice as long as a forward and instant transfers; both rows have it
    there, behind what has started before. All rows are thus taken from one order of everything
    that happens, so that they cannot deadlock, even if each send and each receive blocks its
    worker. (A send directly behind its producer and a receive directly before its consumer
    deadlock in most sizes of 1F1B.) Two stages, two micro-batches of 1F1B:

        worker 0  F0.0   A0>1.0 F0.1   A0>1.1 G0<1.0 B0.0   G0<1.1 B0.1
        worker 1  A1<0.0 F1.0   A1<0.1 B1.0   G1>0.0 F1.1   B1.1   G1>0.1

    Args:
        schedule: Stays as it is; it need not be complete. Transfers are made for what stands in
            it: from forward to forward and from backward to backward.
        skips: Pairs (stash stage, pop stage): each is sent directly, and its gradient back. Between
            neighbours it travels with the boundary, and within a worker nothing is sent.

    Returns:
        A schedule with the same rows otherwise; the same one, if it has transfers already.

    Raises:
        ScheduleError: The schedule deadlocks without any transfer.
        ValueError: A skip does not lead to a later stage of the schedule, or the schedule has
            transfers already, but none for a skip.
    """
    pairs = [_require_skip(skip, schedule) for skip in skips]
    far = sorted({(a, b) for a, b in pairs if b > a + 1 and schedule.are_apart(a, b)})
    if schedule.has_transfers:
        _require_there(far, schedule)
        return schedule
    graph = graph_of(schedule)
    order = run(graph)
    if order.waits:
        raise deadlock(schedule, order.waits)
    return merge_transfers(graph, order, far)


def merge_transfers(graph: Graph, order: Order, skips: Sequence[tuple[int, int]] = ()) -> Schedule:
    """The pass itself, where graph and order of a schedule that runs to its end are at hand."""
    times = clock(graph, order, kind_durations(graph, DURATIONS))
    return _merged(graph, times, _ways(graph.schedule, skips))


def _require_skip(skip: tuple[int, int], schedule: Schedule) -> tuple[int, int]:
    stash, pop = skip
    if not 0 <= stash < pop < schedule.num_stages:
        raise ValueError(
            f"The skip from stage {stash} to stage {pop} is none in {schedule.num_stages} stages. "
            "Name a stage, counted from 0, and a later one."
        )
    return stash, pop


def _require_there(skips: Skips, schedule: Schedule) -> None:
    for stash, pop in skips:
        if (stash, pop) not in schedule.skips:
            raise ValueError(
                f"The schedule has transfers, but none for the skip from stage {stash} to stage "
                f"{pop}. Pass the schedule without its transfers, or add those of the skip."
            )


def _ways(schedule: Schedule, skips: Sequence[tuple[int, int]]) -> Iterator[tuple[Lane, Lane]]:
    """Who makes what is sent, and who needs it."""
    boundaries = [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]
    for stash, pop in [*boundaries, *skips]:
        if schedule.are_apart(stash, pop):
            yield Lane(Kind.FORWARD, stash), Lane(Kind.FORWARD, pop)
            yield Lane(Kind.BACKWARD, pop), Lane(Kind.BACKWARD, stash)


def _merged(graph: Graph, times: Times, ways: Iterable[tuple[Lane, Lane]]) -> Schedule:
    """Puts the transfers between the actions of each row, all in the order of their times."""
    rows = graph.schedule.rows
    starts, ends = np.array(times.starts), np.array(times.ends)
    # Both ends get their transfers in the same order, and computing comes last: where times are
    # equal, that decides in every row alike.
    actions: list[list[Action]] = [[] for _ in rows]
    moments: list[list[NDArray[Any]]] = [[] for _ in rows]
    for maker, needer in ways:
        made = _made(graph, maker, needer)
        for transfers, worker in _both_ends(graph, maker, needer, made):
            actions[worker] += transfers
            moments[worker].append(ends[made])
    for worker, row in enumerate(rows):
        actions[worker] += row
        moments[worker].append(starts[graph.numbers[worker]])
    merged = (_sorted(*each) for each in zip(actions, moments, strict=True))
    return replace(graph.schedule, rows=tuple(merged))


def _made(graph: Graph, maker: Lane, needer: Lane) -> NDArray[np.int64]:
    """The numbers of the maker's actions whose micro-batches the needer has, too."""
    places, stride = graph.places, graph.stride
    if not {maker, needer} <= places.keys():
        return np.array([], np.int64)
    present = graph.counts[[places[maker], places[needer]]].all(axis=0)
    return np.flatnonzero(present) + places[maker] * stride


def _both_ends(
    graph: Graph, maker: Lane, needer: Lane, made: NDArray[np.int64]
) -> Iterator[tuple[list[Transfer], int]]:
    """Each with its transfers and its worker."""
    if not made.size:
        return
    microbatches = [graph.microbatches[index] for index in (made % graph.stride).tolist()]
    send = SENDS[maker.kind]
    ends = (send, maker.stage, needer.stage), (RECEIVE_OF[send], needer.stage, maker.stage)
    for kind, stage, peer in ends:
        transfers = [Transfer(kind, stage, microbatch, peer) for microbatch in microbatches]
        yield transfers, graph.schedule.worker_of(stage)


def _sorted(actions: list[Action], moments: list[NDArray[Any]]) -> tuple[Action, ...]:
    places = np.argsort(np.concatenate(moments), kind="stable")
    return tuple(map(actions.__getitem__, places.tolist()))
