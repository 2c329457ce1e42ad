"""Where layers are measured."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpipe.profiling.copying import copied_to
from gpipe.profiling.stand_in import Copier
from gpipe.stage.device import HOST, Device, default_devices, device_of
from gpipe.stage.placement import require_devices

__all__ = ["computing_on", "moving_to", "place_of"]


def place_of(device: torch.device | str | None) -> Device:
    """The device; None for the first accelerator, or the CPU without any.

    Raises:
        ValueError: It is not on this machine.
    """
    if device is None:
        return device_of((default_devices() or [HOST])[0])
    return device_of(require_devices([device], 1)[0])


def moving_to(device: Device) -> Copier:
    """Makes copies on a device, without a graph."""
    return lambda tensor: copied_to(tensor, device.torch_device)


@contextmanager
def computing_on(device: Device) -> Iterator[None]:
    """Compute on the device's own stream, behind what the caller has enqueued and before the rest.

    There its moments are recorded.
    """
    caller = device.current_stream()
    device.compute.wait_event(caller.record_event())
    try:
        with device.on(device.compute):
            yield
    finally:
        caller.wait_event(device.compute.record_event())
