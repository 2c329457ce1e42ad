"""What a device can do, in a few numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf, isnan

from gpipe.plan.words import count

__all__ = ["DeviceSpec", "edges", "spread"]


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """A device as a plan needs to know it.

    Attributes:
        memory_bytes: What stages may use of it; infinite: whatever they need.
        speed: How fast it is, relative to the device on which layers were measured.
        bandwidth_bytes_per_s: Of its link to the next device; 0 for no limit.
        latency_s: Of each transfer over that link.

    Raises:
        ValueError: A number is negative or none.
    """

    memory_bytes: float = inf
    speed: float = 1.0
    bandwidth_bytes_per_s: float = 0.0
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            number = getattr(self, field.name)
            if isnan(number) or number < 0 or (field.name == "speed" and number == 0):
                raise ValueError(
                    f"`{field.name}` of a device is {number}. Pass a number of at least 0, and a "
                    "speed above 0."
                )


def spread(devices: DeviceSpec | Sequence[DeviceSpec], num_workers: int) -> list[DeviceSpec]:
    """One device for each worker; a single one stands for all.

    Raises:
        ValueError: There are fewer devices than workers.
    """
    if isinstance(devices, DeviceSpec):
        return [devices] * num_workers
    if len(devices) < num_workers:
        raise ValueError(
            f"There are {count(num_workers, 'worker')} and {count(len(devices), 'device')}. "
            "Describe one for each worker, or one that stands for all."
        )
    return list(devices[:num_workers])


def edges(stage_devices: Sequence[DeviceSpec]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bandwidth and latency of each edge between stages: the link of the device before it."""
    before = stage_devices[:-1]
    return (
        tuple(device.bandwidth_bytes_per_s for device in before),
        tuple(device.latency_s for device in before),
    )
