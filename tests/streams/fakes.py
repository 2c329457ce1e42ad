"""Accelerators that are CPU tensors, streams that only keep their order.

The engine runs as it is, through the one interface to devices. What it enqueues is done at once, so
that numbers are right whatever is missing; a `Detector` says whether they would be on a device that
does things later. Where a tensor lives follows from its storage; `tensor.device` and `tensor.to`
tell and do what they would with real accelerators.

Emulated of torch, as its sources have it: a copy between two devices runs on the current stream of
the source, after and before what is on that of the target; the engine runs the backward of a node
on the streams of its forward.
"""

import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import gpipe
from gpipe.stage.device import HOST, Accelerator, Device, device_of
from tests.streams.detector import Clock, Detector, Lane, Memory

__all__ = ["NAME", "Call", "FakeAccelerator", "FakeStream", "World", "tensors_in"]

NAME = "privateuseone"
PACKAGE = Path(gpipe.__file__).parent
NUM_FRAMES = 3


class Call(NamedTuple):
    """A call that orders streams: where it stands in the engine, and what it is about.

    One line may serve activations and gradients: the kinds of the streams tell them apart.
    """

    place: str
    name: str
    kind: str
    other_kind: str


class FakeEvent:
    """A moment in a stream: what had happened by then."""

    def __init__(self, stream: "FakeStream", clock: Clock) -> None:
        self._world = stream.world
        self.kind = stream.kind
        self.clock = clock

    def synchronize(self) -> None:
        """Let the host come after it."""
        if self._world.makes("synchronize", self.kind):
            self._world.synchronize(self.clock, "Event.synchronize")


class FakeStream(Lane):
    """A lane of a fake accelerator."""

    def __init__(self, world: "World", device: "FakeAccelerator", kind: str) -> None:
        super().__init__(
            f"{kind} stream {next(world.numbers)} of device {device.torch_device.index}"
        )
        self.world, self.device = world, device
        self.kind = kind

    def record_event(self) -> FakeEvent:
        """The moment when all that is here so far is done."""
        with self.world.detector.lock:
            made = self.world.makes("record_event", self.kind)
            event = FakeEvent(self, dict(self.clock) if made else {})
            self.world.log.append(("record", self, event))
            return event

    def wait_event(self, event: FakeEvent) -> None:
        """Let what comes here from now on begin after that moment."""
        with self.world.detector.lock:
            if self.world.makes("wait_event", self.kind, event.kind):
                self.world.log.append(("wait", self, event))
                self.wait(event.clock)


class FakeAccelerator(Accelerator):
    """One of several accelerators of a world."""

    def __init__(self, world: "World", index: int) -> None:
        self._world = world
        self._current = threading.local()
        super().__init__(torch.device(NAME, index))
        self.default = FakeStream(world, self, "caller")

    @property
    def generators(self) -> tuple[Device, ...]:
        """Layers draw from the host's."""
        return (device_of(HOST),)

    def current_stream(self) -> FakeStream:
        """That of the calling thread."""
        return getattr(self._current, "stream", self.default)

    def set_current_stream(self, stream: FakeStream) -> None:
        """Let the calling thread compute on this stream from now on."""
        self._current.stream = stream

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """Let the calling thread compute on this stream."""
        before = self.current_stream()
        self.set_current_stream(stream)
        try:
            yield
        finally:
            self.set_current_stream(before)

    def retain(self, tensor: Tensor, stream: FakeStream) -> None:
        """Keep the memory of a tensor from reuse until this stream is past its end."""
        memory = self._world.memory(tensor)
        owner = memory.allocated_on
        if not isinstance(owner, FakeStream) or owner is stream:
            return  # on the host, and for its own stream, there is nothing to keep
        if self._world.makes("retain", stream.kind):
            memory.retained_for.append(stream)

    def moment(self) -> object:
        """A mark in the log."""
        mark = object()
        self._world.log.append(("moment", self.compute, mark))
        return mark

    def new_stream(self, kind: str) -> FakeStream:
        """A stream for the caller."""
        return FakeStream(self._world, self, kind)

    _new_stream = new_stream


class World:
    """Several fake accelerators and what happens on them.

    Args:
        num_devices: How many.
        left_out: Calls that are not made.
    """

    def __init__(self, num_devices: int, left_out: Sequence[Call] = ()) -> None:
        self.detector = Detector()
        self.numbers = count()
        self.log: list[tuple[Any, ...]] = []
        self.calls: dict[Call, None] = {}
        self.synchronizations: list[str] = []
        self._left_out = frozenset(left_out)
        self._memories: dict[int, tuple[Memory, FakeAccelerator | None]] = {}
        self._local = threading.local()
        self.devices = [FakeAccelerator(self, index) for index in range(num_devices)]

    @property
    def names(self) -> list[str]:
        """The devices as `GPipe` takes them."""
        return [str(device.torch_device) for device in self.devices]

    def makes(self, name: str, kind: str, other_kind: str = "") -> bool:
        """Whether the engine's call is to be made; the caller's own always are."""
        place = _place(sys._getframe(2))
        if not place:
            return True
        call = Call(place, name, kind, other_kind)
        self.calls[call] = None
        return call not in self._left_out

    def synchronize(self, clock: Clock, what: str) -> None:
        """Let the host wait."""
        with self.detector.lock:
            if threading.current_thread().name.startswith("gpipe-worker"):
                self.synchronizations.append(what)
            self.detector.host.wait(clock)

    def home(self, tensor: Tensor) -> FakeAccelerator | None:
        """Where a tensor lives; None on the host."""
        return self._entry(tensor)[1]

    def lane(self, device: FakeAccelerator | None) -> Lane:
        """What the calling thread enqueues on there."""
        return self.detector.host if device is None else device.current_stream()

    def memory(self, tensor: Tensor) -> Memory:
        """That of a tensor."""
        return self._entry(tensor)[0]

    def adopt(self, tensor: Tensor, device: FakeAccelerator | None) -> Memory:
        """Let a new tensor live on a device, in memory of the stream that is current there."""
        storage = tensor.untyped_storage()
        memory = Memory(self.lane(device))
        self._memories[storage._cdata] = memory, device
        weakref.finalize(storage, self._free, storage._cdata, memory).atexit = False
        return memory

    def is_known(self, tensor: Tensor) -> bool:
        """Whether its storage has been met."""
        return tensor.untyped_storage()._cdata in self._memories

    def book(self, function: Any, args: Any, results: Sequence[Tensor]) -> None:
        """An operator has run."""
        operands = [(name, tensor) for name, value in args for tensor in tensors_in(value)]
        known = [tensor for _, tensor in operands if self.is_known(tensor)]
        if not known:
            return  # what C++ makes of nothing lives where it is used first
        device = self._device_of(str(function), known)
        for _, tensor in operands:
            self._adopt_unknown(tensor, device)
        written = {each.name for each in function._schema.arguments if _is_written(each)}
        reads = [
            self.memory(tensor) for name, tensor in operands
            if not (function.is_view or name in written or _only_asks_for_sizes(function))
        ]  # fmt: skip
        writes = [self.memory(tensor) for name, tensor in operands if name in written]
        writes += [self.adopt(tensor, device) for tensor in results if not self.is_known(tensor)]
        lane = self.lane(device)
        if reads or writes:
            self.detector.book(str(function), lane, reads, writes)
        if device is not None and torch.Tag.data_dependent_output in function.tags:
            self.synchronize(lane.clock, str(function))

    def move(self, tensor: Tensor, to: FakeAccelerator | None, non_blocking: bool) -> Tensor:
        """A copy of a tensor on another device."""
        source = self.home(tensor)
        lane, target = self.lane(source or to), self.lane(to)
        with self.detector.lock, self.unbooked():
            copy = tensor.clone()
            if source is not None and to is not None:
                lane.wait(target.clock)
            self.log.append(("copy", lane, target if to else lane))
            self.detector.book("copy", lane, [self.memory(tensor)], [self.adopt(copy, to)])
            if source is not None and to is not None:
                target.wait(lane.clock)
            elif not non_blocking:
                self.synchronize(lane.clock, "a blocking copy")
        return copy

    @contextmanager
    def unbooked(self) -> Iterator[None]:
        """What the calling thread does meanwhile is done by the world itself."""
        before, self._local.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self._local.is_paused = before

    @property
    def is_paused(self) -> bool:
        """Whether operators of the calling thread are left out."""
        return getattr(self._local, "is_paused", False)

    def make(
        self, device: FakeAccelerator | None, function: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a function that may make tensors of nothing, on a device."""
        made = function(*args, **kwargs)
        with self.detector.lock:
            for tensor in tensors_in(made):
                self._adopt_unknown(tensor, device)
        return made

    def _adopt_unknown(self, tensor: Tensor, device: FakeAccelerator | None) -> None:
        if not self.is_known(tensor):
            self.detector.book("make", self.lane(device), [], [self.adopt(tensor, device)])

    def _device_of(self, operator: str, operands: Sequence[Tensor]) -> FakeAccelerator | None:
        homes = {self.home(tensor) for tensor in operands if tensor.dim() > 0}
        homes = homes or {self.home(tensor) for tensor in operands}
        if len(homes) > 1:
            raise RuntimeError(f"{operator} has tensors on {homes}")
        return homes.pop()

    def _entry(self, tensor: Tensor) -> tuple[Memory, FakeAccelerator | None]:
        with self.detector.lock:
            if not self.is_known(tensor):
                self.adopt(tensor, None)
            return self._memories[tensor.untyped_storage()._cdata]

    def _free(self, key: int, memory: Memory) -> None:
        with self.detector.lock:
            if self._memories[key][0] is memory:  # and not yet another one at the same place
                del self._memories[key]
            self.detector.free(memory)


def _place(frame: Any) -> str:
    """Where a call stands in the engine, and for whom; empty outside of it."""
    places: list[str] = []
    while frame is not None and len(places) < NUM_FRAMES:
        path = Path(frame.f_code.co_filename)
        if PACKAGE not in path.parents:
            break
        places.append(f"{path.stem}.{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(places)


def tensors_in(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _only_asks_for_sizes(function: Any) -> bool:
    name = function._schema.name.removeprefix("aten::")
    return name.startswith("new_") or name.endswith("_like")
