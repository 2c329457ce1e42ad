"""Messages to and from one other process."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch import distributed as dist

from gpipe.stage.device import HOST

__all__ = ["Peer", "PeerLostError", "Posted", "wait_for"]


class PeerLostError(ConnectionError):
    """A message could not be carried: the process at the other end is gone.

    Attributes:
        worker: Which one it is.
    """

    def __init__(self, worker: int) -> None:
        super().__init__(f"The connection to worker {worker} of the pipe is lost.")
        self.worker = worker


class Posted:
    """A message on its way; its bytes stay where they are until then.

    Args:
        work: What the backend has given.
        line: What is sent or received.
        worker: The other end.
    """

    def __init__(self, work: dist.Work, line: Tensor, worker: int) -> None:
        self._work = work
        self._line = line
        self._worker = worker

    def wait(self) -> None:
        """Wait until it has left, or is there.

        Raises:
            PeerLostError: Neither will ever be.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerLostError(self._worker) from error


def wait_for(messages: Iterable[Posted]) -> None:
    """Wait until all of them have left, or are there.

    Raises:
        PeerLostError: One never will be.
    """
    for posted in messages:
        posted.wait()


class Peer:
    """Another worker of the pipe.

    Args:
        worker: Which one it is.
        group: What carries what lives on the device; several messages with one tag keep their
            order.
        control: The same for what lives on the host.
    """

    def __init__(self, worker: int, group: dist.ProcessGroup, control: dist.ProcessGroup) -> None:
        self.worker = worker
        # By whether it is for the host.
        self._sends = group.send, control.send
        self._receives = group.recv, control.recv

    def send(self, line: Tensor, tag: int, *, on_host: bool = False) -> Posted:
        """Start to send what lies in one stretch of memory."""
        return self._posted(self._sends[on_host], line, tag)

    def receive(self, line: Tensor, tag: int, *, on_host: bool = False) -> Posted:
        """Start to receive into such a stretch."""
        return self._posted(self._receives[on_host], line, tag)

    def send_bytes(self, data: bytes, tag: int) -> list[Posted]:
        """Start to send bytes whose number the other end does not know."""
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        size = torch.tensor([body.numel()], device=HOST)
        return [self.send(each, tag, on_host=True) for each in (size, body)]

    def receive_bytes(self, tag: int) -> bytes:
        """Wait for what `send_bytes` sends."""
        size = torch.empty(1, dtype=torch.int64, device=HOST)
        self.receive(size, tag, on_host=True).wait()
        body = torch.empty(int(size), dtype=torch.uint8, device=HOST)
        self.receive(body, tag, on_host=True).wait()
        return body.numpy().tobytes()

    def _posted(self, post: Callable[..., dist.Work], line: Tensor, tag: int) -> Posted:
        try:
            return Posted(post([line], self.worker, tag), line, self.worker)
        except RuntimeError as error:
            raise PeerLostError(self.worker) from error
