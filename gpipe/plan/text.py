"""Plans as people read them."""

from collections.abc import Iterable, Sequence
from math import inf

from gpipe.plan.grid import Candidate
from gpipe.plan.plan import Plan
from gpipe.plan.search import Found
from gpipe.plan.words import count, shown_balance
from gpipe.units import show_bytes

__all__ = ["found_text", "plan_text"]

COLUMNS = ("weights", "gradients", "optimizer", "inputs", "inside", "transfers", "peak")


def plan_text(plan: Plan, name: str, rows: int) -> str:
    """What the run will be like, and what each stage needs.

    Args:
        plan: The plan.
        name: That of its schedule.
        rows: Those of a mini-batch, of one replica.
    """
    order = plan.schedule
    each = f"{plan.num_replicas} replicas, each " if plan.num_replicas > 1 else ""
    lines = [
        f"{each}{count(order.num_stages, 'stage')} {shown_balance(plan.balance)} on "
        f"{count(order.num_workers, 'device')}, "
        f"{rows} rows in {count(order.num_microbatches, 'micro-batch', 'micro-batches')}, "
        f"{name}, checkpoint {plan.checkpoint}",
        _speed(plan, rows),
        "",
        *_aligned(_memory_rows(plan)),
    ]
    return "\n".join(lines)


def found_text(found: Found, rows: int) -> str:
    """The best plans, and why the others lose."""
    parts = []
    for rank, (candidate, plan) in enumerate(found.best, 1):
        parts.append(f"{rank}. {plan_text(plan, candidate.schedule, rows)}\n")
    if found.next:
        parts += ["Next, and why they lose:", *_reasons(found.next), ""]
    if found.too_large:
        parts += ["Faster, but too large:", *_reasons(found.too_large), ""]
    parts.append(_lines_to_paste(found.best[0][0]))
    return "\n".join(parts)


def _lines_to_paste(candidate: Candidate) -> str:
    return (
        f"For the run file, with {count(candidate.num_devices, 'device')}:\n"
        f"pipeline: {{balance: {list(candidate.balance)}, chunks: {candidate.chunks}, "
        f"schedule: {candidate.schedule}, checkpoint: {candidate.checkpoint}}}"
    )


def _reasons(losers: Iterable[tuple[Candidate, str]]) -> Iterable[str]:
    for candidate, reason in losers:
        yield (
            f"  {shown_balance(candidate.balance)} on {count(candidate.num_devices, 'device')}, "
            f"{candidate.schedule}, {candidate.checkpoint}, chunks {candidate.chunks}: {reason}"
        )


def _speed(plan: Plan, rows: int) -> str:
    if plan.step_s == 0:
        return "step time not known: measure the layers, or give `flops` of a device"
    rows_per_s = plan.num_replicas * rows / plan.step_s
    summed = ""
    if plan.num_replicas > 1:
        summed = f", {plan.visible_reduce_s:.4g} s of it to sum gradients after the drain"
    return (
        f"step {plan.step_s:.4g} s{summed}, {rows_per_s:,.4g} rows/s, bubble {plan.bubble:.1%}; "
        "the optimizer's own time is left out"
    )


def _memory_rows(plan: Plan) -> list[Sequence[str]]:
    has_limit = any(device.memory_bytes < inf for device in plan.devices)
    rows: list[Sequence[str]] = [
        ("stage", "device", "layers", *COLUMNS, *(("of", "") if has_limit else ()))
    ]
    for stage, memory in enumerate(plan.memory):
        worker = plan.schedule.worker_of(stage)
        first = sum(plan.balance[:stage])
        layers = f"{first}-{first + plan.balance[stage] - 1}"
        numbers = map(show_bytes, (*memory, memory.peak_bytes))
        row = [str(stage), str(worker), layers, *numbers]
        if has_limit:
            available = plan.devices[worker].memory_bytes
            fits = plan.worker_bytes[worker] <= available
            row += [show_bytes(available), "" if fits else "too much"]
        rows.append(row)
    return rows


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (text.rjust(width) for text, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
