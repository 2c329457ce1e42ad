"""Which schedule a mini-batch of a given size runs."""

from collections.abc import Callable, Sequence
from hashlib import sha256

from gpipe.errors import ScheduleError
from gpipe.schedule import Builder, Kind, Schedule, add_recompute, add_transfers, as_schedule, check
from gpipe.schedule.breadth_first import breadth_first

__all__ = ["Orders"]

COMPUTING = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)


class Orders:
    """The schedules of one model; each is built and checked once, before it first runs.

    Args:
        spec: A name, a Schedule, or a function (num_stages, num_microbatches) -> Schedule.
        num_stages: Stages of the model.
        num_microbatches: Micro-batches of a full mini-batch.
        num_workers: Workers that share the stages; None where `spec` says.
        skips: The pairs of stages (stash, pop) between which skips go.
        has_transfers: Whether the transfers between workers stand in the rows.

    Raises:
        ScheduleError: The schedule has other sizes, or is incomplete, disordered or deadlocked.
        TypeError: `spec` is none of the three.
        ValueError: The name is unknown, or the stages cannot be shared out under it.
    """

    def __init__(
        self,
        spec: str | Schedule | Builder,
        num_stages: int,
        num_microbatches: int,
        num_workers: int | None,
        *,
        skips: Sequence[tuple[int, int]] = (),
        has_transfers: bool = False,
    ) -> None:
        self._spec = spec
        self._skips = skips
        self._has_transfers = has_transfers
        self._num_stages = num_stages
        self._made: dict[tuple[object, ...], Schedule] = {}
        # A schedule of ours is right for any number; `chunks` may be far more than there are rows.
        num_first = 1 if isinstance(spec, str) else num_microbatches
        first = as_schedule(spec, num_stages, num_first, num_workers)
        check(first)
        self.num_workers = first.num_workers
        self.worker_of = _workers(first)

    def of_step(self, num_microbatches: int, checkpoint: str) -> Schedule:
        """The order that was asked for, with its recomputes."""

        def build() -> Schedule:
            schedule = as_schedule(self._spec, self._num_stages, num_microbatches, self.num_workers)
            if _workers(schedule) != self.worker_of:
                raise ScheduleError(
                    f"With {num_microbatches} micro-batches the stages are on the workers "
                    f"{_workers(schedule)}, with others they were on {self.worker_of}. "
                    "Let the stages stay where they are."
                )
            return _only_computing(schedule)

        return self._checked(("step", num_microbatches, checkpoint), build, checkpoint)

    def of_model(self, num_microbatches: int, checkpoint: str) -> Schedule:
        """Fill-drain, since the loss over the whole output stands between forward and backward."""

        def build() -> Schedule:
            return breadth_first(self.worker_of, num_microbatches)

        return self._checked(("model", num_microbatches, checkpoint), build, checkpoint)

    def describe(self, num_microbatches: int) -> str:
        """What tells it from others: its name, or a digest of what the caller's own gives."""
        if isinstance(self._spec, str):
            return self._spec
        rows = self.of_step(num_microbatches, "never").rows
        return f"your own, with digest {sha256(str(rows).encode()).hexdigest()[:16]}"

    def _checked(
        self, key: tuple[object, ...], build: Callable[[], Schedule], checkpoint: str
    ) -> Schedule:
        if key not in self._made:
            schedule = add_recompute(build(), checkpoint)
            check(schedule)
            if self._has_transfers:
                schedule = add_transfers(schedule, self._skips)
            self._made[key] = schedule
        return self._made[key]


def _workers(schedule: Schedule) -> tuple[int, ...]:
    return tuple(schedule.worker_of(stage) for stage in range(schedule.num_stages))


def _only_computing(schedule: Schedule) -> Schedule:
    """Without transfers of the user's: those of skips and recomputes may be missing there."""
    rows: Sequence[Sequence[object]] = [
        tuple(action for action in row if action.kind in COMPUTING) for row in schedule.rows
    ]
    return Schedule(rows, schedule.num_stages, schedule.num_microbatches)  # type: ignore[arg-type]
