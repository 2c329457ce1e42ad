"""Where stages live."""

from collections.abc import Sequence

import torch

__all__ = ["default_devices", "require_devices"]


def default_devices() -> list[torch.device]:
    """The accelerators of this machine, none on a machine without."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    num_devices = torch.accelerator.device_count()
    return [torch.device(accelerator.type, index) for index in range(num_devices)]


def require_devices(
    devices: Sequence[torch.device | str] | None, num_workers: int
) -> list[torch.device]:
    """One device for each worker.

    Args:
        devices: As the caller gave them; None for the accelerators, or the CPU without any.
        num_workers: How many are needed.

    Raises:
        TypeError: `devices` is one device instead of a list of them.
        ValueError: Their number is not that of the workers.
    """
    if devices is None:
        devices = default_devices()[:num_workers] or [torch.device("cpu")] * num_workers
    if isinstance(devices, str | torch.device):
        raise TypeError(f"devices is {devices!r}. Pass a list with one device for each worker.")
    if len(devices) != num_workers:
        raise ValueError(
            f"There are {num_workers} workers and {len(devices)} devices. "
            "Pass `devices` with one for each worker (one may stand there twice)."
        )
    return [_found(device) for device in devices]


def _found(name: torch.device | str) -> torch.device:
    """The device as its tensors name it: "cuda" is "cuda:0" to them, which is not equal to it."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, TypeError) as error:
        here = ", ".join(map(str, default_devices())) or "none but the CPU"
        raise ValueError(
            f"devices holds {name!r}, which is not on this machine. Here is {here}."
        ) from error
