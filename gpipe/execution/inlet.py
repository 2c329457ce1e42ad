"""The way of what the caller passes in, from where it lives to the stage that takes it."""

from dataclasses import replace

from torch import Tensor

from gpipe.execution.link import Link
from gpipe.stage.boundary import Boundary
from gpipe.stage.device import HOST, Device, Event, Traffic, device_of
from gpipe.stage.microbatch import Batch

__all__ = ["Inlet", "inlet_of", "near"]


class Inlet:
    """Brings what the caller has put in from the host to a device, when it is needed.

    Args:
        target: The device.
    """

    def __init__(self, target: Device) -> None:
        self._link = Link(device_of(HOST), target, Traffic.INPUTS)
        self._last: Event | None = None

    def __call__(self, payload: Boundary) -> Boundary:
        """The same on the device, for what it computes from now on."""
        sent = self._link.send(payload)
        self._last = sent.arrived
        received = self._link.receive(sent)
        assert isinstance(received, Boundary)
        return received

    def finish(self) -> None:
        """Wait until the host's memory is read: the caller may write into it again."""
        if self._last is not None:
            self._last.synchronize()


def near(batch: Batch, device: Device) -> Batch:
    """The batch where `device` can take it from, in the order of the caller's streams.

    What is cut and on the host stays there for an `Inlet`, if the device has streams to copy on.
    All else that is elsewhere is copied here and now, whole.
    """
    tensors, structure = batch.boundary
    moved = [
        _near(tensor, device, is_cut=dim is not None)
        for tensor, dim in zip(tensors, batch.dims, strict=True)
    ]
    return replace(batch, boundary=Boundary(moved, structure))


def inlet_of(batch: Batch, device: Device) -> Inlet | None:
    """What brings the slices of a batch that is near to the device; None where all are there."""
    is_there = all(device.has(tensor) for tensor in batch.boundary.tensors)
    return None if is_there else Inlet(device)


def _near(tensor: Tensor, device: Device, *, is_cut: bool) -> Tensor:
    if not device.has(tensor):
        if is_cut and device.is_asynchronous and tensor.device == HOST:
            return tensor
        moved = tensor.detach().to(device.torch_device)
        tensor = moved.requires_grad_(tensor.requires_grad)
    # The graph may hold it until a backward that the caller runs on another stream.
    device.retain(tensor, device.compute)
    return tensor
