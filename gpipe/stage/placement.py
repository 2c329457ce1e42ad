"""Where stages live, and what they bring along."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import Parameter

from gpipe.stage.device import HOST, default_devices

__all__ = ["require_devices", "require_list", "settle"]


def require_devices(
    devices: Sequence[torch.device | str] | None, num_workers: int
) -> list[torch.device]:
    """One device for each worker.

    Args:
        devices: As the caller gave them; None for the accelerators, or the CPU without any.
        num_workers: How many are needed.

    Raises:
        ValueError: Their number is not that of the workers.
    """
    if devices is None:
        devices = default_devices()[:num_workers] or [HOST] * num_workers
    if len(devices) != num_workers:
        raise ValueError(
            f"There are {num_workers} workers and {len(devices)} devices. "
            "Pass `devices` with one for each worker (one may stand there twice)."
        )
    return [_found(device) for device in devices]


def require_list(devices: object) -> None:
    """Refuse what is no list of devices, before anything is counted.

    Raises:
        TypeError: It is one device instead, or holds something that names none.
    """
    if devices is None:
        return
    if not isinstance(devices, Sequence) or isinstance(devices, str):
        raise TypeError(f"devices is {devices!r}. Pass a list with one device for each worker.")
    for device in devices:
        if not isinstance(device, str | torch.device):
            raise TypeError(f"devices holds {device!r}. Name each device, such as {str(HOST)!r}.")


def settle(layer: nn.Module, device: torch.device, settled: dict[Parameter, Parameter]) -> None:
    """Move a layer to its device, except for parameters that an earlier layer has already.

    Args:
        layer: The layer.
        device: Where it computes.
        settled: What has become of each parameter so far; those of this layer are added. On most
            backends `to` changes a parameter, on some it puts another in its place.
    """
    places = [
        (module, name, parameter, parameter.data)
        for module in layer.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    is_shared = [parameter in settled for _, _, parameter, _ in places]
    layer.to(device)
    for (module, name, parameter, data), shared in zip(places, is_shared, strict=True):
        moved = module._parameters[name]
        assert moved is not None
        if shared and moved is settled[parameter]:
            moved.data = data
        module._parameters[name] = settled.setdefault(parameter, moved)


def _found(name: torch.device | str) -> torch.device:
    """The device as its tensors name it: "cuda" is "cuda:0" to them, which is not equal to it."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, TypeError) as error:
        here = ", ".join(map(str, default_devices())) or "none but the CPU"
        raise ValueError(
            f"devices holds {name!r}, which is not on this machine. Here is {here}."
        ) from error
