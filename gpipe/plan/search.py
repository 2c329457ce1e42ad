"""The best ways to run a model, out of a grid of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from gpipe.costs import LayerCosts
from gpipe.errors import PlanError
from gpipe.plan.bounds import ROUNDING, Bounds
from gpipe.plan.device_spec import DeviceSpec, spread
from gpipe.plan.grid import Candidate, Grid, Way, balances
from gpipe.plan.plan import Outline, Plan, outline, simulated
from gpipe.plan.progress import Bar
from gpipe.plan.reasons import loses, nothing_fits, too_large
from gpipe.schedule import as_schedule

__all__ = ["Found", "Grid", "search"]

Place = tuple[int, ...]  # where a candidate stands in the grid: it decides between equals


class Found(NamedTuple):
    """What a search has found.

    Attributes:
        best: The fastest that fit, in order.
        next: Those behind them that fit, each with the reason why it loses.
        too_large: What would be faster than the best, and does not fit, with the reason.
    """

    best: list[tuple[Candidate, Plan]]
    next: list[tuple[Candidate, str]]
    too_large: list[tuple[Candidate, str]]


def search(
    costs: LayerCosts,
    grid: Grid,
    *,
    rows: int,
    devices: DeviceSpec | Sequence[DeviceSpec],
    optimizer_bytes_per_gradient_byte: float = 0.0,
    accumulates: bool = False,
    num_replicas: int = 1,
    num_best: int = 3,
    progress: bool = False,
) -> Found:
    """Try a grid of ways to run a model, and keep the fastest that fit.

    Every one that could be among them is simulated. The others are known to be slower, by what
    they take at least.

    Args:
        costs: Of the layers.
        grid: What is tried.
        rows: Those of a mini-batch, of one replica.
        devices: The devices of one replica, or one that stands for all.
        optimizer_bytes_per_gradient_byte: How large the state of the optimizer is.
        accumulates: Whether gradients of several mini-batches are added up.
        num_replicas: How many pipelines train together.
        num_best: How many are wanted.
        progress: Whether a bar is shown, on a terminal.

    Raises:
        PlanError: None fits. The message has what the smallest needs, what there is, and what would
            help.
    """
    if not sum(costs.times_s):
        raise PlanError(
            "The costs have no times, so no way to run is faster than another. Measure the layers, "
            "or say with plan.flops what a device does."
        )
    num_given = len(devices) if isinstance(devices, Sequence) else None
    trial = _Trial(
        costs=costs,
        rows=rows,
        devices=spread(devices, num_given or max(grid.num_devices)),
        optimizer_bytes_per_gradient_byte=optimizer_bytes_per_gradient_byte,
        accumulates=accumulates,
        num_replicas=num_replicas,
    )
    ways = Way.each(grid, costs.num_layers, rows, num_given)
    with Bar(is_shown=progress) as bar:
        plans, large = _fastest(trial, list(ways), 2 * num_best, bar)
        if not plans:
            raise nothing_fits(*_smallest(trial, large))
        best, others = plans[:num_best], plans[num_best:]
        fastest = best[0][1]
        return Found(
            best,
            [(candidate, loses(each, fastest)) for candidate, each in others],
            [(each, too_large(made)) for each, made in _faster(trial, large, fastest, num_best)],
        )


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """What is the same for all candidates."""

    costs: LayerCosts
    rows: int
    devices: Sequence[DeviceSpec]
    optimizer_bytes_per_gradient_byte: float
    accumulates: bool
    num_replicas: int
    bounds: Bounds = field(init=False)

    def __post_init__(self) -> None:
        held = self.optimizer_bytes_per_gradient_byte, self.accumulates
        bounds = Bounds(self.costs, self.rows, self.devices, *held)
        object.__setattr__(self, "bounds", bounds)

    def outline(self, candidate: Candidate) -> Outline:
        """What is known of it before it is simulated."""
        return outline(
            self.costs,
            candidate.balance,
            rows=self.rows,
            chunks=candidate.chunks,
            schedule=_order_of(
                candidate.schedule, candidate.num_stages, candidate.chunks, candidate.num_devices
            ),
            checkpoint=candidate.checkpoint,
            num_workers=candidate.num_devices,
            devices=self.devices,
            optimizer_bytes_per_gradient_byte=self.optimizer_bytes_per_gradient_byte,
            accumulates=self.accumulates,
            num_replicas=self.num_replicas,
        )

    def settled(self, candidate: Candidate) -> Outline:
        """Its plan, or as much of it as says that it does not fit."""
        made = self.outline(candidate)
        return made if made.crowded is not None else simulated(made)


# Neighbours in the queue differ in little but the cut.
_order_of = lru_cache(maxsize=8)(as_schedule)


class _Large(NamedTuple):
    """What does not fit."""

    least_s: float
    place: Place
    candidate: Candidate


def _fastest(
    trial: _Trial, ways: Sequence[Way], number: int, bar: Bar
) -> tuple[list[tuple[Candidate, Plan]], list[_Large]]:
    """The fastest that fit; and what does not, of all that could be faster."""
    plans: list[tuple[tuple[float, float], Place, Candidate, Plan]] = []
    large: list[_Large] = []
    queue = _Queue(trial, ways)
    while (entry := queue.pop()) is not None:
        least_s, place, candidate = entry
        if len(plans) >= number and least_s * (1 - ROUNDING) > plans[number - 1][-1].step_s:
            break
        bar.update()
        made = trial.settled(candidate) if trial.bounds.lack_bytes(candidate) <= 0 else None
        if isinstance(made, Plan) and made.crowded is None:
            plans.append((_merit(made), place, candidate, made))
            plans.sort(key=lambda each: each[:2])
        else:
            large.append(_Large(least_s, place, candidate))
    return [(candidate, made) for *_, candidate, made in plans[:number]], large


class _Queue:
    """Candidates by what they take at least; what that is gets known better in their turn."""

    def __init__(self, trial: _Trial, ways: Sequence[Way]) -> None:
        self._bounds = trial.bounds
        self._balances = cache(partial(balances, trial.costs))
        self._entries: list[tuple[float, Place, Way | Candidate]] = [
            (self._bounds.way_s(way), (number,), way) for number, way in enumerate(ways)
        ]
        self._is_known: set[Place] = set()
        heapify(self._entries)

    def pop(self) -> tuple[float, Place, Candidate] | None:
        """The next one with its least time; None behind the last."""
        while self._entries:
            least_s, place, entry = heappop(self._entries)
            if isinstance(entry, Way):
                self._cut(entry, least_s, place)
            elif entry.checkpoint == "except_last" and place not in self._is_known:
                self._is_known.add(place)
                exact_s = self._bounds.candidate_s(entry, counts_recomputes=True)
                heappush(self._entries, (max(least_s, exact_s), place, entry))
            else:
                return least_s, place, entry
        return None

    def _cut(self, way: Way, least_s: float, place: Place) -> None:
        for number, balance in enumerate(self._balances(way.num_stages)):
            candidate = way.cut(balance)
            own_s = max(least_s, self._bounds.candidate_s(candidate))
            heappush(self._entries, (own_s, (*place, number), candidate))


def _merit(made: Plan) -> tuple[float, float]:
    # Sums of the same times in another order are as fast.
    return float(f"{made.step_s:.9g}"), max(made.worker_bytes)


def _faster(
    trial: _Trial, large: Sequence[_Large], fastest: Plan, number: int
) -> list[tuple[Candidate, Plan]]:
    """The fastest of those that do not fit and would be faster than the best that fits."""
    found: list[tuple[float, Place, Candidate, Plan]] = []
    for least_s, place, candidate in large:  # by their least times
        worst_s = found[number - 1][0] if len(found) >= number else fastest.step_s
        if least_s * (1 - ROUNDING) >= worst_s:
            break
        made = simulated(trial.outline(candidate))
        if made.step_s < fastest.step_s:
            found.append((made.step_s, place, candidate, made))
            found.sort(key=lambda each: each[:2])
    return [(candidate, made) for *_, candidate, made in found[:number]]


def _smallest(trial: _Trial, large: Sequence[_Large]) -> tuple[Outline | None, int]:
    """The one of those that do not fit that lacks least, and how many there are."""
    best: Outline | None = None
    smallest = inf
    for least_bytes, each in sorted(
        (trial.bounds.lack_bytes(each.candidate), each) for each in large
    ):
        if least_bytes >= smallest:
            break
        made = trial.settled(each.candidate)
        if (lack := _lack_bytes(made)) < smallest:
            best, smallest = made, lack
    return best, len(large)


def _lack_bytes(made: Outline) -> float:
    pairs = zip(made.worker_bytes, made.devices, strict=True)
    return max(needed - device.memory_bytes for needed, device in pairs)
