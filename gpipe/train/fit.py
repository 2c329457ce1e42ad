"""What to do about a run that does not fit."""

from collections.abc import Iterator

from gpipe.errors import PlanError
from gpipe.plan import Plan
from gpipe.units import show_bytes

__all__ = ["require_fit"]


def require_fit(made: Plan, rows: int) -> None:
    """Refuse a plan that needs more than there is, with what would help.

    Args:
        made: The plan.
        rows: Those of a mini-batch.

    Raises:
        PlanError: A device needs more than it has.
    """
    worker = made.crowded
    if worker is None:
        return
    needed, available = made.worker_bytes[worker], made.devices[worker].memory_bytes
    *first, last = _remedies(made, rows)
    remedies = f"{', '.join(first)}, or {last}" if first else last
    raise PlanError(
        f"Device {worker} needs {show_bytes(needed)} and has {show_bytes(available)}. {remedies}."
    )


def _remedies(made: Plan, rows: int) -> Iterator[str]:
    """Those that change something."""
    yield "See what fits with `--search`"
    num_microbatches = made.schedule.num_microbatches
    if num_microbatches < rows:
        yield f"raise pipeline.chunks from {num_microbatches} to {rows} at most"
    if made.checkpoint != "always":
        yield "set pipeline.checkpoint: always"
    if made.schedule.num_stages < sum(made.balance):
        yield "use more stages"
    if rows > 1:
        yield "lower data.batch_size"
    yield "use an optimizer with less state"
