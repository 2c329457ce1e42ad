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
    devices: Sequence[torch.device | str] | None, num_stages: int
) -> list[torch.device]:
    """One device for each stage.

    Args:
        devices: As the caller gave them; None for the accelerators, or the CPU without any.
        num_stages: How many are needed.

    Raises:
        TypeError: `devices` is one device instead of a list of them.
        ValueError: Their number is not that of the stages.
    """
    if devices is None:
        devices = default_devices()[:num_stages] or [torch.device("cpu")] * num_stages
    if isinstance(devices, str | torch.device):
        raise TypeError(f"devices is {devices!r}. Pass a list with one device for each stage.")
    if len(devices) != num_stages:
        raise ValueError(
            f"There are {num_stages} stages and {len(devices)} devices. "
            "Pass `devices` with one for each stage (one may stand there twice)."
        )
    return [_with_index(torch.device(device)) for device in devices]


def _with_index(device: torch.device) -> torch.device:
    """The device that "cuda" means now: tensors there say "cuda:0", which is not equal to it."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())
