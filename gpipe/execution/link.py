"""The way of tensors from one device to another, beside what both compute."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gpipe.stage.boundary import Boundary, Payload
from gpipe.stage.device import Device, Event, Traffic

__all__ = ["Link", "Sent", "tensors_of"]


class Sent(NamedTuple):
    """What is on its way, and when it has arrived."""

    payload: Payload
    arrived: Event | None
    """None where that need not be known."""


class Link:
    """Copies from a device to another one, of activations or of gradients.

    Only what lives on the source is copied: a layer may have put something elsewhere on purpose,
    such as lengths on the CPU.

    Args:
        source: Whose compute stream makes the tensors.
        target: Whose compute stream needs them.
        traffic: Which of the copy streams are used.
        leads: Whether something is sent on the same streams later that the receiver awaits first.
    """

    def __init__(
        self, source: Device, target: Device, traffic: Traffic, *, leads: bool = False
    ) -> None:
        self._source, self._target = source, target
        self._departure, self._arrival = source.departures[traffic], target.arrivals[traffic]
        # A copy from an accelerator to the host has no other stream than the one it leaves on.
        self._last = self._arrival if target.is_asynchronous else self._departure
        self._leads = leads and target.is_asynchronous

    def send(self, payload: Payload) -> Sent:
        """Enqueue the copies behind what the source computes now; in the sender's thread."""
        self._departure.wait_event(self._source.compute.record_event())
        with self._source.on(self._departure), self._target.on(self._arrival):
            moved = _mapped(payload, self._copy)
        return Sent(moved, None if self._leads else self._last.record_event())

    def receive(self, sent: Sent) -> Payload:
        """Let what the target computes from now on find them; in the receiver's thread."""
        compute = self._target.compute
        if sent.arrived is not None:
            compute.wait_event(sent.arrived)
        for tensor in tensors_of(sent.payload):
            self._target.retain(tensor, compute)
        return sent.payload

    def _copy(self, tensor: Tensor) -> Tensor:
        if not self._source.has(tensor):
            return tensor
        moved = self._target.copy(tensor)
        self._source.retain(tensor, self._departure)
        return moved


def tensors_of(payload: Payload) -> list[Tensor]:
    """The tensors of a boundary, or those gradients that there are."""
    each = payload.tensors if isinstance(payload, Boundary) else payload
    return [tensor for tensor in each if tensor is not None]


def _mapped(payload: Payload, function: Callable[[Tensor], Tensor]) -> Payload:
    if isinstance(payload, Boundary):
        return Boundary([function(tensor) for tensor in payload.tensors], payload.structure)
    return [None if tensor is None else function(tensor) for tensor in payload]
