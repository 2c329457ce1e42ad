"""The rows of actions that workers execute."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from gpipe.arguments import require_count
from gpipe.schedule.action import RECEIVE_OF, SEND_OF, Action, Kind, Transfer
from gpipe.schedule.lane import Lane

__all__ = ["Schedule"]

TRANSFER_KINDS = RECEIVE_OF.keys() | SEND_OF.keys()


@dataclass(frozen=True)
class Schedule:
    """What every worker does, in its order: data that is drawn, checked, simulated and run.

    A schedule only holds the rows; whether they make sense is what `check` says.

    Attributes:
        rows: One row of actions per worker. Lists are taken, too, and become tuples.
        num_stages: Stages of the model (K): the actions name stages 0 to K - 1.
        num_microbatches: Micro-batches of a mini-batch (M): the actions name 0 to M - 1.

    Raises:
        TypeError: A size is no whole number, or a row holds something that is no `Action`.
        ValueError: A size is below 1.
    """

    rows: tuple[tuple[Action, ...], ...]
    num_stages: int
    num_microbatches: int

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "rows", tuple(_frozen(worker, row) for worker, row in enumerate(self.rows)))
        for name in ("num_stages", "num_microbatches"):
            set_field(self, name, require_count(name, getattr(self, name)))

    @property
    def num_workers(self) -> int:
        """The number of rows."""
        return len(self.rows)

    def worker_of(self, stage: int) -> int:
        """The worker whose row names `stage` (the first one, should several do).

        Raises:
            ValueError: No row names the stage.
        """
        if stage not in self._worker_by_stage:
            known = sorted(self._worker_by_stage)
            raise ValueError(f"Stage {stage} stands in no row. Ask for one of {known}.")
        return self._worker_by_stage[stage]

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages that the row of `worker` names, ascending."""
        return self._stages_by_worker[worker]

    def recomputed_in(self, stage: int) -> frozenset[int]:
        """The micro-batches whose activations `stage` drops and recomputes."""
        return self._recomputed_by_stage.get(stage, frozenset())

    def are_apart(self, stage: int, other: int) -> bool:
        """Whether two stages live on different workers, so that data must travel between them."""
        return self._worker_by_stage.get(stage) != self._worker_by_stage.get(other)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All lanes of which the rows name an action."""
        return self._coded[0]

    @property
    def lane_rows(self) -> tuple[tuple[int, ...], ...]:
        """The rows again, with the place in `lanes` for each action."""
        return self._coded[1]

    @cached_property
    def has_transfers(self) -> bool:
        """Whether a row names a send or a receive."""
        return any(lane.peer is not None for lane in self.lanes)

    @cached_property
    def skips(self) -> frozenset[tuple[int, int]]:
        """The (stash, pop) pairs of stages, no neighbours, between which something is sent."""
        ways = {ends for lane in self.lanes if (ends := lane.ends)}
        return frozenset((stash, pop) for stash, pop in ways if pop != stash + 1)

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs whose activations are dropped and recomputed."""
        by_stage = self._recomputed_by_stage
        return frozenset(
            (stage, microbatch) for stage in by_stage for microbatch in by_stage[stage]
        )

    @cached_property
    def _coded(self) -> tuple[tuple[Lane, ...], tuple[tuple[int, ...], ...]]:
        places: defaultdict[tuple[Kind, int, tuple[int, ...]], int] = defaultdict(count().__next__)
        rows = tuple(
            tuple([places[action[0], action[1], action[3:]] for action in row]) for row in self.rows
        )
        return tuple(Lane(kind, stage, *peer) for kind, stage, peer in places), rows

    @cached_property
    def _recomputed_by_stage(self) -> dict[int, frozenset[int]]:
        by_stage: defaultdict[int, set[int]] = defaultdict(set)
        for row in self.rows:
            for action in row:
                if action[0] is Kind.RECOMPUTE:
                    by_stage[action[1]].add(action[2])
        return {stage: frozenset(microbatches) for stage, microbatches in by_stage.items()}

    @cached_property
    def _stages_by_worker(self) -> tuple[tuple[int, ...], ...]:
        stages = ({self.lanes[lane].stage for lane in set(row)} for row in self.lane_rows)
        return tuple(tuple(sorted(row)) for row in stages)

    @cached_property
    def _worker_by_stage(self) -> dict[int, int]:
        workers = reversed(range(self.num_workers))  # so that the first one stays
        return {stage: worker for worker in workers for stage in self._stages_by_worker[worker]}


def _frozen(worker: int, row: Iterable[Action]) -> tuple[Action, ...]:
    actions = tuple(row)
    if not _are_actions(actions):
        wrong = next(action for action in actions if not _are_actions((action,)))
        raise TypeError(
            f"The row of worker {worker} holds {wrong!r}, which is no action. Write "
            "Action(kind, stage, microbatch) with a `Kind`, or for a send or a receive "
            "Transfer(kind, stage, microbatch, peer)."
        )
    return actions


def _are_actions(actions: tuple[Action, ...]) -> bool:
    """Whether each is what it should be; all at once, since a schedule may have millions."""
    types = set(map(type, actions))
    if not types <= {Action, Transfer}:
        return False
    kinds = [action[0] for action in actions]
    if not set(map(type, kinds)) <= {Kind}:
        return False
    pairs = set(zip(map(type, actions), kinds, strict=True))
    return all((kind in TRANSFER_KINDS) == (found is Transfer) for found, kind in pairs)
