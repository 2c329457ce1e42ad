"""When each action of a schedule runs."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from gpipe.schedule.action import SEND_OF, Kind
from gpipe.schedule.graph import Graph
from gpipe.schedule.order import Order

__all__ = ["Times", "clock", "kind_durations"]

COMPUTE, RECEIVE = -1, -2  # what stands for the link where there is none


class Times(NamedTuple):
    """The start and the end of each action, by its number; those of a receive are its send's."""

    starts: list[float]
    ends: list[float]


def clock(graph: Graph, order: Order, durations: Sequence[float]) -> Times:
    """Runs the rows with times, each action as early as it can.

    A worker computes one action after the other. A transfer runs beside: it starts when its sender
    has done what stands before it in the row and the link is free. There is one link per pair of
    workers and direction; it carries one transfer at a time.

    Args:
        graph: That of a schedule.
        order: How its rows run against each other.
        durations: By place of a lane in `graph.places`: how long its actions take, in any unit. A
            receive takes as long as its send, whatever is said here.

    Returns:
        Times that count from 0; both are 0 for what never runs.
    """
    times = Times([0] * graph.size, [0] * graph.size)
    starts, ends = times
    needs, links = graph.needs, _links(graph)
    free: list[float] = [0] * len(graph.numbers)
    link_free: list[float] = [0] * len(links)
    for worker, steps in _turns(graph, order):
        now = free[worker]
        for number, lane in steps:
            link = links[lane]
            if link == RECEIVE:
                continue
            if link != COMPUTE:
                start = max(now, link_free[link])
                receive = number + needs[lane][-1]
                starts[number] = starts[receive] = start
                ends[number] = ends[receive] = link_free[link] = start + durations[lane]
                continue
            for distance in needs[lane]:
                end = ends[number + distance]
                now = end if end > now else now
            starts[number] = now
            ends[number] = now = now + durations[lane]
        free[worker] = now
    return times


def _turns(graph: Graph, order: Order) -> Iterator[tuple[int, Iterator[tuple[int, int]]]]:
    """Whose turn it is, with the numbers and lanes of what it then does."""
    rows = [
        zip(numbers.tolist(), lanes, strict=True)
        for numbers, lanes in zip(graph.numbers, graph.schedule.lane_rows, strict=True)
    ]
    places = [0] * len(rows)
    for worker, stop in order.turns:
        yield worker, islice(rows[worker], stop - places[worker])
        places[worker] = stop


def kind_durations(graph: Graph, durations: Mapping[Kind, float]) -> list[float]:
    """Durations for `clock` where they follow from the kind; 0 for those that are not named."""
    return [durations.get(lane.kind, 0) for lane in graph.places]


def _links(graph: Graph) -> list[int]:
    """By place of a lane: the number of the link that it takes, or what stands for none."""
    found: dict[tuple[int, int], int] = {}
    links = []
    for kind, stage, peer in graph.places:
        if peer is None or kind in SEND_OF:
            links.append(COMPUTE if peer is None else RECEIVE)
        else:
            ways = graph.schedule.worker_of(stage), graph.schedule.worker_of(peer)
            links.append(found.setdefault(ways, len(found)))
    return links
