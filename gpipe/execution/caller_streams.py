"""The streams on which the caller computes, beside those of the engine."""

from collections.abc import Iterable

from torch import Tensor

from gpipe.stage.device import Device, Event, Stream, Traffic, device_of

__all__ = ["CallerStreams", "ready_events"]


class CallerStreams:
    """The caller's streams on the devices of the stages, during one mini-batch.

    The caller may come back with others: `backward()` may be called under another stream than the
    forward, and what it brings is used under either.

    Args:
        devices: Those of the stages.
    """

    def __init__(self, devices: Iterable[Device]) -> None:
        self._devices = [device for device in dict.fromkeys(devices) if device.is_asynchronous]
        self._streams: dict[Device, list[Stream]] = {device: [] for device in self._devices}

    def fork(self) -> None:
        """Let what the stages compute from now on begin after what the caller has enqueued."""
        for device in self._devices:
            current = device.current_stream()
            begun = current.record_event()
            device.compute.wait_event(begun)
            # What is on the host may still be on its way there.
            device.arrivals[Traffic.INPUTS].wait_event(begun)
            if current not in self._streams[device]:
                self._streams[device].append(current)

    def join(self) -> None:
        """Let what the caller enqueues from now on begin after all that the stages have."""
        for device in self._devices:
            # A copy that leaves may be one of the caller's own tensors, passed through as it is.
            for busy in (device.compute, *device.departures.values()):
                done = busy.record_event()
                for stream in self._streams[device]:
                    stream.wait_event(done)

    def meet(self) -> None:
        """Let the streams of the forward come after the caller's current ones."""
        for device in self._devices:
            current = device.current_stream()
            for stream in self._streams[device]:
                if stream != current:
                    stream.wait_event(current.record_event())

    def retain(self, tensors: Iterable[Tensor | None]) -> None:
        """Keep what the stages have made while the caller, who is given it, still uses it."""
        if not self._devices:
            return
        for tensor in tensors:
            if tensor is None:
                continue
            device = device_of(tensor.device)
            for stream in self._streams.get(device, ()):
                device.retain(tensor, stream)


def ready_events(tensors: Iterable[Tensor | None]) -> list[Event]:
    """When these tensors are there, made on the current streams of the calling thread."""
    devices = {device_of(tensor.device) for tensor in tensors if tensor is not None}
    return [device.current_stream().record_event() for device in devices if device.is_asynchronous]
