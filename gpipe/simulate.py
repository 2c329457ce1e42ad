"""Predicts when each action of a schedule runs, and what is held meanwhile."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from gpipe.costs import StageCosts
from gpipe.schedule import Kind, Schedule
from gpipe.schedule.clock import Times, clock
from gpipe.schedule.collector import paused_collector
from gpipe.schedule.graph import Graph, graph_of
from gpipe.schedule.order import Order, run
from gpipe.schedule.refusal import deadlock
from gpipe.schedule.transfers import merge_transfers
from gpipe.timeline import Event, HeldBytes, LostTime, Timeline

__all__ = ["simulate"]

ByKind = Mapping[Kind, Sequence[float]]


@paused_collector()
def simulate(schedule: Schedule, costs: StageCosts) -> Timeline:
    """Runs a schedule with times but without tensors.

    Every action starts as early as its row, its predecessors and its link allow. A transfer starts
    when its sender has done what stands before it in the row; it overlaps with computing, and
    keeps the link from its worker to the other one busy.

    Args:
        schedule: One that runs to its end; it need not be complete. Transfers are added where
            there are none.
        costs: Of the stages of this schedule.

    Returns:
        A timeline in seconds from the first start, with transfers, held bytes and lost time.

    Raises:
        ScheduleError: The schedule deadlocks.
        ValueError: The costs are those of another number of stages.
    """
    if costs.num_stages != schedule.num_stages:
        raise ValueError(
            f"The costs are those of {costs.num_stages} stages, and the schedule has "
            f"{schedule.num_stages}. Pass costs for each of its stages."
        )
    given, given_order = graph, order = _run(schedule)
    if not schedule.has_transfers:
        graph, order = _run(merge_transfers(graph, order))
    times = clock(graph, order, _durations(graph, _by_kind(costs), costs))
    return Timeline(
        tuple(chain.from_iterable(_events(graph, times))),
        schedule.num_workers,
        tuple(_held(graph, times, costs)),
        tuple(_lost_time(given, given_order, max(times.ends, default=0.0), costs)),
    )


def _run(schedule: Schedule) -> tuple[Graph, Order]:
    graph = graph_of(schedule)
    order = run(graph)
    if order.waits:
        raise deadlock(schedule, order.waits)
    return graph, order


def _by_kind(costs: StageCosts) -> ByKind:
    return {
        Kind.FORWARD: costs.forward_s,
        Kind.RECOMPUTE: costs.recompute_s,
        Kind.BACKWARD: costs.backward_s,
    }


def _durations(graph: Graph, by_kind: ByKind, costs: StageCosts | None = None) -> list[float]:
    """By place of a lane; without `costs`, transfers take no time."""
    durations = []
    for kind, stage, peer in graph.places:
        if peer is None:
            durations.append(by_kind[kind][stage])
        else:
            durations.append(costs.transfer_s(stage, peer) if costs else 0)
    return durations


def _events(graph: Graph, times: Times) -> Iterator[Iterator[Event]]:
    starts_s, ends_s = times
    for worker, row in enumerate(graph.schedule.rows):
        numbers = graph.numbers[worker].tolist()
        row_starts_s = map(starts_s.__getitem__, numbers)
        yield map(Event, repeat(worker), row, row_starts_s, map(ends_s.__getitem__, numbers))


def _held(graph: Graph, times: Times, costs: StageCosts) -> Iterator[HeldBytes]:
    """What each worker holds after each action that changes it."""
    starts_s, ends_s = np.array(times.starts), np.array(times.ends)
    changes = _changes(graph, costs)
    frees = np.array([lane.kind is Kind.BACKWARD for lane in graph.places])
    counts = np.array([lane.peer is None for lane in graph.places])
    for numbers, row in zip(graph.numbers, graph.schedule.lane_rows, strict=True):
        lanes = np.array(row, np.int64)
        numbers, lanes = numbers[counts[lanes]], lanes[counts[lanes]]
        moments_s = np.where(frees[lanes], ends_s[numbers], starts_s[numbers])
        levels = np.cumsum(changes[numbers])
        yield HeldBytes(tuple(moments_s.tolist()), tuple(levels.tolist()))


def _changes(graph: Graph, costs: StageCosts) -> NDArray[np.float64]:
    """By number: the bytes that an action takes hold of, less those that it lets go of."""
    changes = np.zeros((len(graph.places), graph.stride))
    for (kind, stage, _), place in graph.places.items():
        held_bytes, input_bytes = costs.held_bytes[stage], costs.input_bytes[stage]
        recomputed = list(graph.schedule.recomputed_in(stage))
        if kind is Kind.FORWARD:
            changes[place] = held_bytes
            changes[place, recomputed] = input_bytes
        elif kind is Kind.RECOMPUTE:
            changes[place] = held_bytes - input_bytes
        elif kind is Kind.BACKWARD:
            changes[place] = -held_bytes
    return changes.ravel()


def _lost_time(graph: Graph, order: Order, end_s: float, costs: StageCosts) -> Iterator[LostTime]:
    """Compares with a run without transfers, and with one of equal stages and nothing besides.

    Args:
        graph: That of the schedule, with its transfers or without.
        order: How its rows run against each other.
        end_s: The makespan with transfers.
        costs: Those of the simulation.
    """
    by_kind = _by_kind(costs)
    equal = {kind: (fmean(numbers_s),) * len(numbers_s) for kind, numbers_s in by_kind.items()}
    equal[Kind.RECOMPUTE] = (0.0,) * costs.num_stages
    instant = clock(graph, order, _durations(graph, by_kind))
    ideal = clock(graph, order, _durations(graph, equal))
    transfer_s = max(0.0, end_s - max(instant.ends, default=0.0))
    for idle, (fill_s, drain_s), recompute_s in zip(
        _idle(graph, instant), _idle(graph, ideal), _recompute_s(graph, costs), strict=True
    ):
        ideal_s, idle_s = fill_s + drain_s, sum(idle)
        share = min(1.0, idle_s / ideal_s) if ideal_s else 0.0
        rest_s = max(0.0, idle_s - ideal_s)
        yield LostTime(share * fill_s, share * drain_s, rest_s, transfer_s, recompute_s)


def _idle(graph: Graph, times: Times) -> Iterator[tuple[float, float]]:
    """The idle time of each worker before its first backward, and afterwards."""
    starts_s, ends_s = np.array(times.starts), np.array(times.ends)
    is_backward = np.array([lane.kind is Kind.BACKWARD for lane in graph.places])
    for numbers, row in zip(graph.numbers, graph.schedule.lane_rows, strict=True):
        busy_s = ends_s[numbers] - starts_s[numbers]
        backwards = np.flatnonzero(is_backward[list(row)])
        first = int(backwards[0]) if backwards.size else len(row)
        turn_s = float(starts_s[numbers[first]] if backwards.size else ends_s.max(initial=0))
        fill_s, drain_s = (
            turn_s - busy_s[:first].sum(),
            ends_s.max() - turn_s - busy_s[first:].sum(),
        )
        yield max(0.0, float(fill_s)), max(0.0, float(drain_s))


def _recompute_s(graph: Graph, costs: StageCosts) -> Iterator[float]:
    durations_s = [
        costs.recompute_s[lane.stage] if lane.kind is Kind.RECOMPUTE else 0 for lane in graph.places
    ]
    for row in graph.schedule.lane_rows:
        yield sum(map(durations_s.__getitem__, row))
