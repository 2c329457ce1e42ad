"""The best ways to run a model, out of a grid of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from gpipe.costs import LayerCosts
from gpipe.errors import PlanError
from gpipe.partition import balance_costs
from gpipe.plan.device_spec import DeviceSpec
from gpipe.plan.plan import Outline, Plan, outline, simulated
from gpipe.schedule import LOOPED_SCHEDULES, RECOMPUTE_MODES, SCHEDULE_NAMES
from gpipe.units import show_bytes

__all__ = ["Found", "Grid", "search"]


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
    num_best: int = 3,
) -> Found:
    """Try a grid of ways to run a model, and keep the fastest that fit.

    Every one that could be among them is simulated. The others are known to be slower: no step is
    shorter than the work of its busiest worker.

    Args:
        costs: Of the layers.
        grid: What is tried.
        rows: Those of a mini-batch.
        devices: The devices, or one that stands for all.
        optimizer_bytes_per_gradient_byte: How large the state of the optimizer is.
        accumulates: Whether gradients of several mini-batches are added up.
        num_best: How many are wanted.

    Raises:
        PlanError: None fits. The message has what the smallest needs, what there is, and what would
            help.
    """
    if not sum(costs.times_s):
        raise PlanError(
            "The costs have no times, so no way to run is faster than another. Measure the layers, "
            "or say with plan.flops what a device does."
        )
    candidates = list(_candidates(costs, grid, rows, devices))

    def outlined(candidate: Candidate) -> Outline:
        return outline(
            costs,
            candidate.balance,
            rows=rows,
            chunks=candidate.chunks,
            schedule=candidate.schedule,
            checkpoint=candidate.checkpoint,
            num_workers=candidate.num_devices,
            devices=devices,
            optimizer_bytes_per_gradient_byte=optimizer_bytes_per_gradient_byte,
            accumulates=accumulates,
        )

    outlines = {candidate: outlined(candidate) for candidate in candidates}
    plans, large = _fastest(outlines, 2 * num_best)
    if not plans:
        raise _nothing_fits(large)
    best, others = plans[:num_best], plans[num_best:]
    fastest = best[0][1]
    return Found(
        best,
        [(candidate, _loses(each, fastest)) for candidate, each in others],
        _too_large(large, fastest, num_best),
    )


def _fastest(
    outlines: dict[Candidate, Outline], number: int
) -> tuple[list[tuple[Candidate, Plan]], dict[Candidate, Outline]]:
    """The fastest that fit; and those that do not."""
    plans: list[tuple[Candidate, Plan]] = []
    large: dict[Candidate, Outline] = {}
    for candidate, made in sorted(outlines.items(), key=lambda item: item[1].busy_s):
        if made.crowded is not None:
            large[candidate] = made
            continue
        if len(plans) >= number and made.busy_s > plans[number - 1][1].step_s:
            break
        found = simulated(made)
        if found.crowded is not None:
            large[candidate] = found
            continue
        plans.append((candidate, found))
        plans.sort(key=lambda item: _order(item[1]))
    return plans[:number], large


def _order(made: Plan) -> tuple[float, float]:
    # Sums of the same times in another order are as fast.
    return float(f"{made.step_s:.9g}"), max(made.worker_bytes)


def _candidates(
    costs: LayerCosts, grid: Grid, rows: int, devices: DeviceSpec | Sequence[DeviceSpec]
) -> Iterator[Candidate]:
    num_given = len(devices) if isinstance(devices, Sequence) else max(grid.num_devices)
    chunks = sorted({min(number, rows) for number in grid.chunks})
    for schedule, share, num_devices in product(
        grid.schedules, grid.stages_per_device, grid.num_devices
    ):
        num_stages = share * num_devices
        has_several = schedule in LOOPED_SCHEDULES
        if num_devices > num_given or num_stages > costs.num_layers or (share > 1) != has_several:
            continue
        for balance in _balances(costs, num_stages):
            for checkpoint, number in product(grid.checkpoints, chunks):
                yield Candidate(schedule, checkpoint, number, num_devices, balance)


def _balances(costs: LayerCosts, num_stages: int) -> list[tuple[int, ...]]:
    """By time in both ways, and by what layers hold."""
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


def _loses(made: Plan, fastest: Plan) -> str:
    slower = made.step_s / fastest.step_s - 1
    if slower < 0.0005:
        return f"as fast, and needs {show_bytes(max(made.worker_bytes))} on a device"
    reasons: dict[str, Callable[[Plan], float]] = {
        "bubble": lambda each: each.bubble,
        "recompute": _recomputed,
    }
    parts = [
        f"{name} {reason(made):.1%} instead of {reason(fastest):.1%}"
        for name, reason in reasons.items()
        if reason(made) - reason(fastest) > 0.0005
    ]
    return f"{slower:.1%} slower: {', '.join(parts) or 'its busiest device has more to do'}"


def _recomputed(made: Plan) -> float:
    """The part of all workers' time that goes into recomputes."""
    lost = made.timeline.lost_time or ()
    total_s = made.step_s * made.schedule.num_workers
    return sum(each.recompute_s for each in lost) / total_s if total_s else 0.0


def _too_large(
    large: dict[Candidate, Outline], fastest: Plan, number: int
) -> list[tuple[Candidate, str]]:
    faster = []
    for candidate, made in large.items():
        if made.busy_s < fastest.step_s:
            step_s = simulated(made).step_s
            if step_s < fastest.step_s:
                faster.append((step_s, candidate, made))
    faster.sort(key=lambda item: item[0])
    return [
        (candidate, f"would take {step_s:.4g} s, but {_lack(made)}")
        for step_s, candidate, made in faster[:number]
    ]


def _lack(made: Outline) -> str:
    worker = made.crowded
    assert worker is not None
    needed, there = made.worker_bytes[worker], made.devices[worker].memory_bytes
    return f"device {worker} needs {show_bytes(needed)} of {show_bytes(there)}"


def _nothing_fits(outlines: dict[Candidate, Outline]) -> PlanError:
    if not outlines:
        return PlanError(
            "The grid holds no way to run this model: there are more stages than layers in each. "
            "Allow fewer devices."
        )
    smallest = min(outlines.values(), key=_worst_lack)
    worker = smallest.crowded
    assert worker is not None
    stage = max(
        smallest.schedule.stages_of(worker), key=lambda each: smallest.memory[each].peak_bytes
    )
    return PlanError(
        f"Nothing fits. The best of {len(outlines)} ways has {smallest.schedule.num_stages} stages "
        f"{list(smallest.balance)}, {smallest.schedule.num_microbatches} micro-batches and "
        f"checkpoint={smallest.checkpoint!r}, and {_lack(smallest)}, most of it for "
        f"{_largest_part(smallest, stage)} of stage {stage}. Use more devices or larger ones, "
        "fewer rows, an optimizer with less state, or split the largest layer."
    )


def _worst_lack(made: Outline) -> float:
    pairs = zip(made.worker_bytes, made.devices, strict=True)
    return max(needed - device.memory_bytes for needed, device in pairs)


def _largest_part(made: Outline, stage: int) -> str:
    parts = made.memory[stage]._asdict()
    return max(parts, key=parts.__getitem__).removesuffix("_bytes")
