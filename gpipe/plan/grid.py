"""The ways to run a model that a search tries."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from gpipe.costs import LayerCosts
from gpipe.partition import balance_costs
from gpipe.schedule import LOOPED_SCHEDULES, RECOMPUTE_MODES, SCHEDULE_NAMES

__all__ = ["Candidate", "Grid", "Way", "balances"]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is tried.

    Attributes:
        num_devices: How many devices are used, each number in turn.
        stages_per_device: How many stages a device has, where the schedule lets it have several.
        chunks: How many micro-batches; numbers above that of the rows are left out.
        schedules: By name.
        checkpoints: The modes.
    """

    num_devices: Sequence[int]
    stages_per_device: Sequence[int] = (1, 2)
    chunks: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    schedules: Sequence[str] = SCHEDULE_NAMES
    checkpoints: Sequence[str] = RECOMPUTE_MODES


class Candidate(NamedTuple):
    """One way to run, by name."""

    schedule: str
    checkpoint: str
    chunks: int
    num_devices: int
    balance: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.balance)


class Way(NamedTuple):
    """What candidates have in common that differ in nothing but the cut."""

    schedule: str
    checkpoint: str
    chunks: int
    num_devices: int
    num_stages: int

    @classmethod
    def each(cls, grid: Grid, num_layers: int, rows: int, num_given: int | None) -> Iterator["Way"]:
        """All of a grid that there can be.

        Args:
            grid: What is tried.
            num_layers: Stages that there are layers for.
            rows: Those of a mini-batch, which makes as many micro-batches at most.
            num_given: How many devices there are; None: as many as are wanted.
        """
        chunks = sorted({min(number, rows) for number in grid.chunks})
        for schedule, share, num_devices in product(
            grid.schedules, grid.stages_per_device, grid.num_devices
        ):
            has_several = schedule in LOOPED_SCHEDULES
            is_possible = num_given is None or num_devices <= num_given
            if is_possible and share * num_devices <= num_layers and (share > 1) == has_several:
                for checkpoint, number in product(grid.checkpoints, chunks):
                    yield cls(schedule, checkpoint, number, num_devices, share * num_devices)

    def cut(self, balance: tuple[int, ...]) -> Candidate:
        """The candidate with these stages."""
        return Candidate(self.schedule, self.checkpoint, self.chunks, self.num_devices, balance)


def balances(costs: LayerCosts, num_stages: int) -> list[tuple[int, ...]]:
    """The cuts that are tried: by time in both ways, and by what layers hold."""
    held = [
        parameters + gradients + saved * costs.rows
        for parameters, gradients, saved in zip(
            costs.parameter_bytes, costs.gradient_bytes, costs.saved_bytes_per_row, strict=True
        )
    ]
    found = (
        balance_costs(costs.times_s, num_stages, "variance"),
        balance_costs(costs.times_s, num_stages, "bottleneck"),
        balance_costs(held, num_stages, "bottleneck"),
    )
    return list(dict.fromkeys(map(tuple, found)))
