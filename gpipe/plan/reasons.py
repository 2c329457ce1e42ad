"""Why a way to run a model loses, or does not fit."""

from collections.abc import Callable

from gpipe.errors import PlanError
from gpipe.plan.plan import Outline, Plan
from gpipe.plan.words import count, shown_balance
from gpipe.units import show_bytes

__all__ = ["loses", "nothing_fits", "too_large"]


def loses(made: Plan, fastest: Plan) -> str:
    """Why a plan that fits is not the best."""
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


def too_large(made: Plan) -> str:
    """How fast a plan would be that does not fit."""
    return f"would take {made.step_s:.4g} s, but {_lack(made)}"


def nothing_fits(smallest: Outline | None, number: int) -> PlanError:
    """The error where no way fits.

    Args:
        smallest: The one that lacks least; None where there is none at all.
        number: How many there are.
    """
    if smallest is None:
        return PlanError(
            "The grid holds no way to run this model: there are more stages than layers in each. "
            "Allow fewer devices."
        )
    worker = smallest.crowded
    assert worker is not None
    stage = max(
        smallest.schedule.stages_of(worker), key=lambda each: smallest.memory[each].peak_bytes
    )
    return PlanError(
        f"Nothing fits. The best of {count(number, 'way')} has "
        f"{count(smallest.schedule.num_stages, 'stage')} {shown_balance(smallest.balance)}, "
        f"{count(smallest.schedule.num_microbatches, 'micro-batch', 'micro-batches')} and "
        f"checkpoint={smallest.checkpoint!r}, and {_lack(smallest)}, most of it for "
        f"{_largest_part(smallest, stage)} of stage {stage}. Use more devices or larger ones, "
        "fewer rows, an optimizer with less state, or split the largest layer."
    )


def _recomputed(made: Plan) -> float:
    """The part of all workers' time that goes into recomputes."""
    lost = made.timeline.lost_time or ()
    total_s = made.step_s * made.schedule.num_workers
    return sum(each.recompute_s for each in lost) / total_s if total_s else 0.0


def _lack(made: Outline) -> str:
    worker = made.crowded
    assert worker is not None
    needed, there = made.worker_bytes[worker], made.devices[worker].memory_bytes
    return f"device {worker} needs {show_bytes(needed)} of {show_bytes(there)}"


def _largest_part(made: Outline, stage: int) -> str:
    parts = made.memory[stage]._asdict()
    return max(parts, key=parts.__getitem__).removesuffix("_bytes")
