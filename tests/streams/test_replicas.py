"""Sums over replicas are ordered with the streams of stages and of the caller."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import Parameter

from gpipe.execution import sums
from gpipe.execution.reduction import SummedReduction
from tests.streams.fakes import Call, FakeAccelerator, World
from tests.streams.world import Operators, world

WAYS = ("backend", "ring")
ON = ("compute", "caller")


class Work:
    """What a backend with a stream of its own returns."""

    def __init__(self, tensor: Tensor, device: FakeAccelerator, stream: Any) -> None:
        self._device, self._stream = device, stream
        stream.wait_event(device.current_stream().record_event())
        with device.on(stream):
            tensor.mul_(2)
        device.retain(tensor, stream)

    def wait(self) -> None:
        self._device.current_stream().wait_event(self._stream.record_event())


@contextmanager
def two_equal_ranks(made: World) -> Iterator[None]:
    """Every sum doubles; the ring computes on a thread, where the world would not see it."""
    device = made.devices[0]
    communication = device.new_stream("communication")

    def all_reduce(tensor: Tensor, **_: Any) -> Work:
        return Work(tensor, device, communication)

    def in_a_ring(tensor: Tensor, *_: Any, **__: Any) -> None:
        with Operators(made):
            tensor.mul_(2)

    def new_stream(device: Any) -> Any:
        return device.new_stream("ring")

    with (
        patch.object(dist, "all_reduce", all_reduce),
        patch.object(sums, "ring_all_reduce", in_a_ring),
        patch.object(sums, "_new_stream", new_stream),
    ):
        yield


def run(way: str, on: str, left_out: Sequence[Call] = ()) -> World:
    """Mini-batches whose sums are taken on this stream, and one that fails."""
    with world(1, left_out) as made, two_equal_ranks(made):
        device = made.devices[0]
        summing: Any = sums.RingSums(None, None) if way == "ring" else sums.BackendSums(None)
        stream = device.compute if on == "compute" else device.default
        try:
            for is_complete in (True, False):  # where it is not, the host waits
                mini_batch(device, summing, stream, is_complete)
            abandoned(device, summing)
        finally:
            summing.close()
    return made


def mini_batch(device: FakeAccelerator, summing: sums.Sums, stream: Any, is_complete: bool) -> None:
    reduction = SummedReduction(summing, bucket_bytes=40)
    sizes = (5, 5, 20)  # two in one bucket, and one that has its own
    with device.on(device.compute):
        parameters = [Parameter(torch.zeros(size, device=device.torch_device)) for size in sizes]
        gradients: list[Tensor | None] = [torch.ones_like(each) for each in parameters]
        if not is_complete:
            gradients[2] = None
        reduction.add(parameters, gradients)
    with device.on(stream):
        found = [gradient for _, gradient in reduction.finish()]
        for gradient, is_there in zip(found, (True, True, is_complete), strict=True):
            assert (gradient is not None) == is_there
            if gradient is not None:
                gradient.mul_(2)


def abandoned(device: FakeAccelerator, summing: sums.Sums) -> None:
    """Nobody waits for the sums of a mini-batch that fails."""
    with device.on(device.compute):
        parameter = Parameter(torch.zeros(5, device=device.torch_device))
        SummedReduction(summing, 40).add([parameter], [torch.ones_like(parameter)])


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_missing(way, on):
    assert run(way, on).detector.reports == []


def test_no_call_can_be_left_out():
    worlds = {(way, on): run(way, on) for way in WAYS for on in ON}
    calls = dict.fromkeys(call for made in worlds.values() for call in made.calls)
    assert {call.name for call in calls} == {"record_event", "wait_event", "retain"}
    unneeded = [
        call
        for call in calls
        if not any(
            run(*case, (call,)).detector.reports
            for case, made in worlds.items()
            if call in made.calls
        )
    ]
    assert unneeded == []
