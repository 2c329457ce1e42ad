"""Where layers are measured."""

import pytest
import torch

from gpipe.profiling.place import computing_on, moving_to, place_of
from gpipe.stage.device import HOST, Device, device_of


class Stream:
    """Writes down what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> str:
        return self.name

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


class Streamed(Device):
    """A device with streams, in which nothing runs."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.log: list[str] = []
        self.callers, self.compute = Stream("caller", self.log), Stream("compute", self.log)

    def current_stream(self) -> Stream:
        return self.callers


def test_the_cpu_is_the_place_without_an_accelerator():
    if not torch.accelerator.is_available():
        assert place_of(None) is device_of(HOST)
    assert place_of("cpu") is device_of(HOST)


@pytest.mark.parametrize("fails", [False, True])
def test_measuring_is_between_what_the_caller_does_before_and_after(fails):
    device = Streamed()
    try:
        with computing_on(device):
            device.log.append("measured")
            assert not fails
    except AssertionError:
        assert fails
    assert device.log == ["compute waits for caller", "measured", "caller waits for compute"]


def test_copies_have_no_graph_and_memory_of_their_own():
    tensor = torch.rand(3, 4, requires_grad=True).t() * 2
    copy = moving_to(device_of(HOST))(tensor)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert copy.data_ptr() != tensor.data_ptr()
    assert not copy.requires_grad
