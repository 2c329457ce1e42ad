"""The rows of actions that workers execute."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from gpipe.arguments import require_count
from gpipe.schedule.action import Action, Kind

__all__ = ["Schedule"]


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

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs whose activations are dropped and recomputed."""
        return frozenset(
            (action.stage, action.microbatch)
            for row in self.rows
            for action in row
            if action.kind == Kind.RECOMPUTE
        )

    @cached_property
    def _recomputed_by_stage(self) -> dict[int, frozenset[int]]:
        by_stage: defaultdict[int, set[int]] = defaultdict(set)
        for stage, microbatch in self.recomputed:
            by_stage[stage].add(microbatch)
        return {stage: frozenset(microbatches) for stage, microbatches in by_stage.items()}

    @cached_property
    def _stages_by_worker(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted({action.stage for action in row})) for row in self.rows)

    @cached_property
    def _worker_by_stage(self) -> dict[int, int]:
        workers = reversed(range(self.num_workers))  # so that the first one stays
        return {stage: worker for worker in workers for stage in self._stages_by_worker[worker]}


def _frozen(worker: int, row: Iterable[Action]) -> tuple[Action, ...]:
    actions = tuple(row)
    for action in actions:
        if not (isinstance(action, Action) and isinstance(action.kind, Kind)):
            raise TypeError(
                f"The row of worker {worker} holds {action!r}, which is no action. "
                "Write Action(kind, stage, microbatch) with a `Kind`."
            )
    return actions
