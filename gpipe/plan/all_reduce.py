"""What it takes to sum gradients over devices."""

from collections.abc import Sequence

from gpipe.arguments import require_count
from gpipe.schedule import Kind
from gpipe.timeline import Timeline

__all__ = ["one_reducer_s", "ring_bytes", "ring_s", "visible_s"]


def one_reducer_s(
    num_devices: int, num_bytes: float, bandwidth_bytes_per_s: float, *, overlap_s: float = 0.0
) -> float:
    """Seconds until one device has the arrays of all others.

    They come over its one link. What it sends back goes the other way and is not counted.

    Args:
        num_devices: All of them; the reducer is one.
        num_bytes: Of the array that each has.
        bandwidth_bytes_per_s: Of the reducer's link; 0 for no limit.
        overlap_s: How long the devices still compute meanwhile: that much is hidden.

    Raises:
        TypeError: `num_devices` is no whole number.
        ValueError: `num_devices` is below 1, or another number is negative or none.
    """
    others = require_count("num_devices", num_devices) - 1
    incoming_bytes = others * _require_amount("num_bytes", num_bytes)
    return _visible_s(incoming_bytes, bandwidth_bytes_per_s, overlap_s)


def ring_bytes(num_devices: int, num_bytes: float) -> float:
    """Bytes that each device of a ring sends; it receives as many.

    Args:
        num_devices: In the ring.
        num_bytes: Of the array that each has.

    Raises:
        TypeError: `num_devices` is no whole number.
        ValueError: `num_devices` is below 1, or `num_bytes` is negative or none.
    """
    count = require_count("num_devices", num_devices)
    return 2 * (count - 1) * _require_amount("num_bytes", num_bytes) / count


def ring_s(
    num_devices: int, num_bytes: float, bandwidth_bytes_per_s: float, *, overlap_s: float = 0.0
) -> float:
    """Seconds that a ring takes, in which all links carry at the same time.

    Args:
        num_devices: In the ring.
        num_bytes: Of the array that each has.
        bandwidth_bytes_per_s: Of the slowest link, each way; 0 for no limit.
        overlap_s: How long the devices still compute meanwhile: that much is hidden.

    Raises:
        TypeError: `num_devices` is no whole number.
        ValueError: `num_devices` is below 1, or another number is negative or none.
    """
    return _visible_s(ring_bytes(num_devices, num_bytes), bandwidth_bytes_per_s, overlap_s)


def visible_s(timeline: Timeline, reduce_s: Sequence[float]) -> float:
    """Seconds after the last action until all sums are there, each started as soon as it can be.

    A worker sums what one of its stages has when that has done its last backward, one sum after the
    other.

    Args:
        timeline: Of a mini-batch.
        reduce_s: How long the sum of each stage takes.
    """
    ready_s: dict[int, tuple[float, int]] = {}
    for worker, action, _, end_s in timeline.events:
        if action.kind is Kind.BACKWARD:
            last_s, _ = ready_s.get(action.stage, (0.0, worker))
            ready_s[action.stage] = max(last_s, end_s), worker
    free_s: dict[int, float] = {}
    for stage, (at_s, worker) in sorted(ready_s.items(), key=lambda item: item[1]):
        free_s[worker] = max(free_s.get(worker, 0.0), at_s) + reduce_s[stage]
    return max([0.0, *(end_s - timeline.makespan_s for end_s in free_s.values())])


def _visible_s(moved_bytes: float, bandwidth_bytes_per_s: float, overlap_s: float) -> float:
    """What is left of the time that bytes take on a link."""
    bandwidth = _require_amount("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    hidden_s = _require_amount("overlap_s", overlap_s)
    return max(0.0, moved_bytes / bandwidth - hidden_s) if bandwidth else 0.0


def _require_amount(name: str, value: float) -> float:
    if not value >= 0:  # a NaN is not, either
        raise ValueError(f"`{name}` is {value}. Pass a number of at least 0.")
    return value
