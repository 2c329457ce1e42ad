"""Sums of tensors over all ranks, under way while something else runs."""

from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, NamedTuple, Protocol
from weakref import finalize

import torch
from torch import Tensor
from torch import distributed as dist

from gpipe.execution.all_reduce import ring_all_reduce
from gpipe.stage.device import Device, Event, Stream, device_of

__all__ = ["BackendSums", "RingSums", "Sum", "Sums"]

_END_S = 1.0  # a thread that is done ends at once


class Sum(Protocol):
    """One that is under way."""

    def wait(self) -> Any:
        """Wait for it: what the calling thread enqueues next on its stream finds the sum."""


class Sums(Protocol):
    """A way to sum over the ranks of a group; all of them start the same sums in one order."""

    def start(self, tensor: Tensor) -> Sum:
        """Sum contiguous tensors in place, after what the calling thread has enqueued."""

    def close(self) -> None:
        """Leave no thread behind."""


class BackendSums:
    """Made by the group's backend."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def start(self, tensor: Tensor) -> Sum:
        """Sum contiguous tensors in place, after what the calling thread has enqueued."""
        work: Sum | None = dist.all_reduce(tensor, group=self._group, async_op=True)
        assert work is not None, "this rank is not in the group"
        return work

    def close(self) -> None:
        """There is no thread of ours."""


class RingSums:
    """Made in rings, one after the other, on a thread that lives from the first sum to `close`.

    After a sum that failed, neighbours are out of step: all later ones fail with its error.

    Args:
        group: With this rank in it; None: all ranks.
        order: Of its ranks in the ring; None: ascending.
    """

    def __init__(self, group: dist.ProcessGroup | None, order: Sequence[int] | None) -> None:
        self._ring = _Ring(group, order)
        self._thread: Thread | None = None

    def start(self, tensor: Tensor) -> Sum:
        """Sum contiguous tensors in place, after what the calling thread has enqueued."""
        if self._thread is None:
            self._start_thread()
        device = device_of(tensor.device)
        task = _Task(tensor, device, device.current_stream().record_event(), Future())
        self._tasks.put(task)
        return _RingSum(device, task.summed)

    def close(self) -> None:
        """End the thread when what was started is done.

        A sum whose peer is gone ends by the timeout of its group only; it is not waited for.
        """
        if self._thread is not None:
            self._end()
            self._thread = None

    def _start_thread(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        args = self._ring, self._tasks
        # A daemon, so that the process can end although a peer of a sum is gone.
        self._thread = Thread(target=_make_sums, args=args, name="gpipe-ring", daemon=True)
        self._thread.start()
        self._end = finalize(self, _end, self._tasks, self._thread)


class _Ring(NamedTuple):
    group: dist.ProcessGroup | None
    order: Sequence[int] | None


class _Task(NamedTuple):
    tensor: Tensor
    device: Device
    ready: Event
    summed: "Future[Event]"


class _RingSum(NamedTuple):
    device: Device
    summed: "Future[Event]"

    def wait(self) -> None:
        self.device.current_stream().wait_event(self.summed.result())


def _end(tasks: "SimpleQueue[_Task | None]", thread: Thread) -> None:
    tasks.put(None)
    # It lets go of the group, in whose end the interpreter must not end: that would abort it.
    if thread is not current_thread():
        thread.join(_END_S)


def _make_sums(ring: _Ring, tasks: "SimpleQueue[_Task | None]") -> None:
    streams: dict[Device, Stream] = {}
    error: BaseException | None = None
    while (task := tasks.get()) is not None:
        if error is None:
            error = _make_sum(ring, task, streams)
        if error is not None:
            task.summed.set_exception(error)


def _make_sum(ring: _Ring, task: _Task, streams: dict[Device, Stream]) -> BaseException | None:
    """Returns the error, if there was one."""
    tensor, device = task.tensor, task.device
    try:
        if device not in streams:
            streams[device] = _new_stream(device)
        stream = streams[device]
        with device.on(stream):
            stream.wait_event(task.ready)
            device.retain(tensor, stream)
            ring_all_reduce(tensor, ring.group, order=ring.order)
            task.summed.set_result(stream.record_event())
    except BaseException as error:  # noqa: BLE001 - whoever waits gets it
        return error
    return None


def _new_stream(device: Device) -> Stream:
    # Sums would hold up whatever else is on the stream, and it them.
    return torch.Stream(device.torch_device) if device.is_asynchronous else device.compute
