"""Whether two workers agree on the order of what they send each other."""

from collections.abc import Iterator, Sequence

import numpy as np

from gpipe.schedule.action import SEND_OF, Action, Transfer
from gpipe.schedule.graph import Graph, Numbers
from gpipe.schedule.lane import Lane
from gpipe.schedule.refusal import Mistake

__all__ = ["crossed"]


def crossed(graph: Graph) -> Iterator[Mistake]:
    """Names the pairs of workers whose transfers stand in different orders in the two rows.

    Communication that is matched by its order would hang there, or mix up what is sent.

    Args:
        graph: That of a schedule in which each transfer has both its ends.
    """
    sends, peers = _sends(graph), _peers(graph)
    rows = [_by_peer(graph, worker, sends, peers) for worker in range(len(graph.numbers))]
    for worker, row in enumerate(rows):
        for peer in sorted(peer for peer in row if peer > worker):
            differ = np.flatnonzero(row[peer] != rows[peer][worker])
            if differ.size:
                pair = row[peer][differ[0]], rows[peer][worker][differ[0]]
                yield _disagreement(graph, (worker, peer), [int(number) for number in pair])


def _by_peer(graph: Graph, worker: int, sends: Numbers, peers: Numbers) -> dict[int, Numbers]:
    """The transfers of a row in its order, by the worker at the other end; each by its send."""
    lanes = np.array(graph.schedule.lane_rows[worker], np.int64)
    numbers, others = graph.numbers[worker] + sends[lanes], peers[lanes]
    return {int(peer): numbers[others == peer] for peer in np.unique(others) if peer >= 0}


def _sends(graph: Graph) -> Numbers:
    """By place of a lane: what to add to get the number of its send; 0 where there is none."""
    distances = [
        graph.distance(lane, Lane(SEND_OF[lane.kind], lane.peer, lane.stage))
        if lane.peer is not None and lane.kind in SEND_OF
        else 0
        for lane in graph.places
    ]
    return np.array(distances, np.int64)


def _peers(graph: Graph) -> Numbers:
    """By place of a lane: the worker at the other end; -1 where there is none."""
    worker_of = graph.schedule.worker_of
    peers = [-1 if lane.peer is None else worker_of(lane.peer) for lane in graph.places]
    return np.array(peers, np.int64)


def _disagreement(graph: Graph, workers: tuple[int, int], sends: Sequence[int]) -> Mistake:
    """Tells what comes first on either worker; each names its own end of the transfer."""
    found = [_end_on(worker, graph, send) for worker, send in zip(workers, sends, strict=True)]
    one, other = workers
    fact = f"Workers {one} and {other} disagree on what comes next between them: {found[0]} on"
    rest = f"worker {one}, {found[1]} on worker {other}. Put their transfers in the same order."
    return Mistake(f"{fact} {rest}", tuple(found))


def _end_on(worker: int, graph: Graph, send: int) -> Action:
    action = graph.action(send)
    assert isinstance(action, Transfer), "only transfers cross"
    return action if graph.schedule.worker_of(action.stage) == worker else action.partner
