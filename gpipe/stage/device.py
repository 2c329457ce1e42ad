"""What the engine asks of a device; nothing else in the package knows one kind from another.

An accelerator works through streams: a call only enqueues, and nothing but events orders what two
streams do. Three calls keep that order, `record_event` and `wait_event` of a stream and `retain` of
a device, and only this module and those that carry tensors between workers make them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import cache
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gpipe.stage.dense_parts import dense_parts

__all__ = [
    "HOST",
    "Accelerator",
    "Device",
    "Event",
    "Memory",
    "Stream",
    "Traffic",
    "default_devices",
    "device_of",
    "from_host",
    "register_device",
    "runtime_versions",
]

HOST = torch.device("cpu")


class Event(Protocol):
    """A moment in a stream."""

    def synchronize(self) -> None:
        """Let the calling thread wait until the stream has come there."""


class Stream(Protocol):
    """What a device does one after the other."""

    def record_event(self) -> Any:
        """The moment when all that was enqueued so far is done."""

    def wait_event(self, event: Any) -> None:
        """Let what is enqueued from now on begin after that moment."""


class Traffic(Enum):
    """What is copied between devices; each has copy streams of its own."""

    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    INPUTS = "inputs"
    """From the host; they must not queue behind activations that are not there yet."""


class Memory(NamedTuple):
    """What a device has and what is in use."""

    allocated_bytes: int
    """By the tensors of this process."""
    free_bytes: int
    """To all processes."""
    total_bytes: int


class _AtOnce:
    """The stream, and each of its events, of a device where a call returns when all is done."""

    def record_event(self) -> "_AtOnce":
        return self

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        """There is nothing to wait for."""


_AT_ONCE = _AtOnce()


class Device:
    """A device that computes at once, in the thread that asks it to, as the CPU does.

    Attributes:
        torch_device: The name by which tensors know it.
        compute: The stream on which stages compute.
        arrivals: The stream on which copies arrive, by what is copied.
        departures: The stream on which copies leave, by what is copied.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.compute: Stream = _AT_ONCE
        self.arrivals: Mapping[Traffic, Stream] = dict.fromkeys(Traffic, _AT_ONCE)
        self.departures: Mapping[Traffic, Stream] = dict.fromkeys(Traffic, _AT_ONCE)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.torch_device)!r})"

    @property
    def is_asynchronous(self) -> bool:
        """Whether there are streams to be ordered."""
        return self.compute is not _AT_ONCE

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor lives here."""
        return tensor.device == self.torch_device

    def current_stream(self) -> Stream:
        """That on which the calling thread computes here."""
        return _AT_ONCE

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Let the calling thread compute on this stream of the device meanwhile."""
        return nullcontext()

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy here, with the same strides, enqueued on the current streams of both devices.

        It is there when what is recorded behind it has passed. A copy between two accelerators is
        enqueued on the current stream of the source, and torch lets the target's wait for it;
        where no direct way exists between the two, the driver goes through pinned memory.
        """
        is_enqueued = self.is_asynchronous or device_of(tensor.device).is_asynchronous
        copied = tensor.detach().to(self.torch_device, non_blocking=is_enqueued)
        return copied.requires_grad_(tensor.requires_grad)

    def retain(self, tensor: Tensor, stream: Stream) -> None:
        """Keep the memory of a tensor that lives here from reuse until this stream is past now.

        For one that was made on another stream, to which its memory goes back when it is freed.
        """

    def moment(self) -> Any:
        """A mark in time behind what was enqueued so far, for `seconds`."""
        return perf_counter()

    def seconds(self, moments: list[Any]) -> list[float]:
        """When each of these moments was, on the clock of the host; may wait for the last."""
        return moments

    @property
    def generators(self) -> "tuple[Device, ...]":
        """The devices from whose default generators layers may draw that compute here."""
        return (device_of(HOST),)

    def random_state(self) -> Tensor:
        """The state of the device's default generator."""
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        """Put the generator into this state."""
        torch.set_rng_state(state)

    def seeded_state(self, seed: int) -> Tensor:
        """The state that this seed gives."""
        return torch.Generator(HOST).manual_seed(seed).get_state()

    def memory(self) -> Memory | None:
        """What is in use; None where torch does not say."""
        return None

    def reaches(self, other: "Device") -> bool | None:
        """Whether copies go from here to there directly; None where torch does not say."""
        return None

    def synchronize(self) -> None:
        """Let the calling thread wait until all that was enqueued is done."""

    @property
    def product(self) -> str | None:
        """What its maker calls it; None where torch does not say."""
        return None


class Accelerator(Device):
    """A device with streams, by way of torch's interface to any accelerator."""

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self.compute = self._new_stream("compute")
        if self._new_stream("another") == self.compute:
            raise ValueError(
                f"{torch_device} has one stream only, and gpipe orders several. Put the stages on "
                "the CPU, or on an accelerator with streams."
            )
        self.arrivals = {each: self._new_stream(f"{each.value} in") for each in Traffic}
        leaving = Traffic.ACTIVATIONS, Traffic.GRADIENTS
        self.departures = {each: self._new_stream(f"{each.value} out") for each in leaving}

    def current_stream(self) -> Stream:
        """That on which the calling thread computes here."""
        return torch.accelerator.current_stream(self.torch_device)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Let the calling thread compute on this stream of the device meanwhile."""
        # Not `with stream`, which keeps in the stream what it has to go back to: two threads that
        # compute on one stream would go back to each other's.
        with torch.accelerator.device_index(self.torch_device.index):
            before = self.current_stream()
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)  # type: ignore[arg-type]

    def retain(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of a tensor that lives here from reuse until this stream is past now."""
        for part in dense_parts(tensor):
            if self.has(part):
                part.record_stream(stream)

    def moment(self) -> Any:
        """A mark in time behind what was enqueued so far, for `seconds`."""
        event = torch.Event(self.torch_device, enable_timing=True)
        event.record(self.compute)  # type: ignore[arg-type]
        return event

    def seconds(self, moments: list[Any]) -> list[float]:
        """When each of these moments was, on the clock of the host; waits for the last.

        Times of two devices have no common zero. Each is measured backwards from now, when both
        are at rest and the host's clock is known.
        """
        if not moments:
            return []
        now = torch.Event(self.torch_device, enable_timing=True)
        now.record(self.compute)  # type: ignore[arg-type]
        now.synchronize()
        now_s = perf_counter()
        # One long span and many short ones: the precision of a span falls with its length.
        first = moments[0]
        first_s = now_s - first.elapsed_time(now) / 1000
        return [first_s + first.elapsed_time(moment) / 1000 for moment in moments]

    @property
    def generators(self) -> tuple[Device, ...]:
        """The devices from whose default generators layers may draw that compute here."""
        return device_of(HOST), self

    def random_state(self) -> Tensor:
        """The state of the device's own generator."""
        state: Tensor = self._module().get_rng_state(self.torch_device)
        return state

    def set_random_state(self, state: Tensor) -> None:
        """Put the device's own generator into this state."""
        self._module().set_rng_state(state, self.torch_device)

    def seeded_state(self, seed: int) -> Tensor:
        """The state that this seed gives."""
        return torch.Generator(self.torch_device).manual_seed(seed).get_state()

    def memory(self) -> Memory | None:
        """What is in use; None where torch does not say."""
        try:
            free_bytes, total_bytes = torch.accelerator.get_memory_info(self.torch_device)
            allocated_bytes = torch.accelerator.memory_allocated(self.torch_device)
        except RuntimeError:  # not every device of every kind can be asked
            return None
        return Memory(allocated_bytes, free_bytes, total_bytes)

    def reaches(self, other: Device) -> bool | None:
        """Whether copies go from here to there directly; None where torch does not say."""
        asks = getattr(self._module(), "can_device_access_peer", None)
        if asks is None or type(other) is not type(self):
            return None
        return bool(asks(self.torch_device, other.torch_device))

    def synchronize(self) -> None:
        """Let the calling thread wait until all that was enqueued is done."""
        torch.accelerator.synchronize(self.torch_device)

    @property
    def product(self) -> str | None:
        """What its maker calls it; None where torch does not say."""
        asks = getattr(self._module(), "get_device_name", None)
        return str(asks(self.torch_device)) if asks else None

    def _new_stream(self, _: str) -> Stream:
        return torch.Stream(self.torch_device)

    def _module(self) -> Any:
        # torch.accelerator has no random numbers; all such modules agree on these two names.
        return torch.get_device_module(self.torch_device)


_members: dict[torch.device, Device] = {}
_members_lock = Lock()


def device_of(torch_device: torch.device) -> Device:
    """The one object for this device in the process: its streams are shared by all models."""
    if torch_device not in _members:
        with _members_lock:  # of two objects, each would have streams of its own
            if torch_device not in _members:
                kind = Accelerator if torch_device.type == _accelerator_type() else Device
                _members[torch_device] = kind(torch_device)
    return _members[torch_device]


def register_device(device: Device) -> None:
    """Let this object speak for its device: one that torch's common interface does not cover."""
    _members[device.torch_device] = device


def default_devices() -> list[torch.device]:
    """The accelerators of this machine that have streams, none on a machine without."""
    accelerator_type = _accelerator_type()
    if accelerator_type is None or not _has_streams(accelerator_type):
        return []
    num_devices = torch.accelerator.device_count()
    return [torch.device(accelerator_type, index) for index in range(num_devices)]


def own_device(device_type: str) -> torch.device:
    """The device of this process among those of a type: the current one, or the host."""
    if device_type == HOST.type:
        return HOST
    return torch.device(device_type, torch.accelerator.current_device_index())


def from_host(numbers: Sequence[float], like: Tensor) -> Tensor:
    """The numbers as a tensor of that dtype, where it lives, without waiting for a stream."""
    return torch.tensor(numbers, dtype=like.dtype, device=HOST).to(like.device, non_blocking=True)


def runtime_versions() -> dict[str, str]:
    """The versions of what this build of torch drives accelerators with, by name."""
    found = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    return {name: str(version) for name, version in found.items() if version}


@cache
def _has_streams(accelerator_type: str) -> bool:
    # Some accelerators have one stream that they call new each time.
    return torch.Stream(accelerator_type) != torch.Stream(accelerator_type)


def _accelerator_type() -> str | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else None
