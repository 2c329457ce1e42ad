"""The streams of the caller, and their order, which is his own affair."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.streams.fakes import FakeStream, World

__all__ = ["before_deletion", "follow", "on", "streams"]


@contextmanager
def on(streams: list[FakeStream]) -> Iterator[None]:
    """Let the caller compute on these streams, one for each device."""
    before = [stream.device.current_stream() for stream in streams]
    for stream in streams:
        stream.device.set_current_stream(stream)
    try:
        yield
    finally:
        for stream in before:
            stream.device.set_current_stream(stream)


def streams(made: World) -> list[FakeStream]:
    """New ones for the caller, that begin after what he has done so far."""
    new = [device.new_stream("caller") for device in made.devices]
    follow(new, [device.current_stream() for device in made.devices])
    return new


def follow(later: list[FakeStream], earlier: list[FakeStream]) -> None:
    """The caller's own order between two sets of streams."""
    for mine, other in zip(later, earlier, strict=True):
        mine.wait_event(other.record_event())


def before_deletion(made: World, *used: list[FakeStream]) -> None:
    """The caller's own order between his streams and those on which he made his model."""
    for each in used:
        follow([device.current_stream() for device in made.devices], each)
