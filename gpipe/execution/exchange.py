"""A few numbers of every worker, brought to all of them, over and over."""

from collections.abc import Sequence
from struct import Struct

import torch

from gpipe.execution.peer import Posted, wait_for
from gpipe.execution.pipe import Pipe

__all__ = ["FLOATS", "WHOLE", "Exchange"]

_MOST_NUMBERS = 8  # of a worker
_FIRST_TAG = 2**30 - 4  # above those of wires, below that of outputs

WHOLE = Struct(f"{_MOST_NUMBERS}q")
FLOATS = Struct(f"{_MOST_NUMBERS}d")


class Exchange:
    """Rounds in which every worker tells some numbers and hears those of all.

    The host hears the others and tells them what it has heard. It listens to the next round at the
    end of each: what the others tell then leaves at once, and does not wait at its sender until it
    is asked for, as in a collective.

    Args:
        pipe: The workers.
        host: Which of them.
        kind: `WHOLE` numbers, or `FLOATS`, which keep all their bits.
        number: Another exchange of the same workers has another.
    """

    def __init__(self, pipe: Pipe, host: int, kind: Struct, number: int = 0) -> None:
        self._kind = kind
        self._tag = _FIRST_TAG - 2 * number
        self._worker = pipe.worker
        self._is_host = pipe.worker == host
        others = [each for each in range(pipe.num_workers) if each != host]
        self._peers = [pipe.peer(worker) for worker in (others if self._is_host else [host])]
        size = pipe.num_workers * kind.size
        self._heard = bytearray(size)
        # What is told next is written while what was heard last may still be on its way.
        self._told = bytearray(size if self._is_host else kind.size)
        with torch.inference_mode(False):  # what is made in it cannot be written into outside
            heard = torch.frombuffer(self._heard, dtype=torch.uint8)
            self._told_line = torch.frombuffer(self._told, dtype=torch.uint8)
            rows = heard.view(pipe.num_workers, kind.size)
            self._lines = [rows[worker] for worker in others] if self._is_host else [heard]
        self._num_told = 0
        self._coming: list[Posted] = []
        self._leaving: list[Posted] = []

    def round(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        """The numbers of every worker, by worker; all tell as many.

        Raises:
            PeerLostError: A process that is needed for it is gone.
        """
        self.tell(numbers)
        return self.hear()

    def tell(self, numbers: Sequence[float]) -> None:
        """Begin a round: the host waits for the others, and they for nobody."""
        self._num_told = len(numbers)
        line = self._kind.pack(*numbers, *[0] * (_MOST_NUMBERS - len(numbers)))
        if not self._is_host:
            self._listen()
            self._send(line)
            return
        if not self._coming:  # in the first round
            self._listen()
        self._wait()
        start = self._worker * len(line)
        self._heard[start : start + len(line)] = line
        self._send(self._heard)

    def hear(self) -> list[tuple[float, ...]]:
        """End the round that has begun: the numbers of every worker, by worker."""
        if not self._is_host:
            self._wait()
        rows = [row[: self._num_told] for row in self._kind.iter_unpack(self._heard)]
        if self._is_host:
            self._listen()
        return rows

    def _wait(self) -> None:
        wait_for(self._coming)
        self._coming.clear()

    def _listen(self) -> None:
        for peer, line in zip(self._peers, self._lines, strict=True):
            self._coming.append(peer.receive(line, self._tag, on_host=True))

    def _send(self, data: bytes | bytearray) -> None:
        wait_for(self._leaving)  # of the round before
        self._told[:] = data
        line = self._told_line
        self._leaving = [peer.send(line, self._tag, on_host=True) for peer in self._peers]
