"""A few numbers of every worker, brought to all of them, over and over."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gpipe.execution.peer import Posted
from gpipe.execution.pipe import Pipe
from gpipe.stage.device import HOST

__all__ = ["Exchange"]

_WIDTH = 8  # the most numbers of a worker
_TAG = 2**30 - 4  # above those of wires, below that of outputs


class Exchange:
    """Rounds in which every worker tells some numbers and hears those of all.

    Worker 0 hears the others and tells them what it has heard. It listens to the next round at the
    end of each: what the others tell then leaves at once, and does not wait at its sender until it
    is asked for, as in a collective.

    Args:
        pipe: The workers.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._is_host = pipe.worker == 0
        others = range(1, pipe.num_workers) if self._is_host else (0,)
        self._peers = [pipe.peer(worker) for worker in others]
        self._rows = torch.zeros(pipe.num_workers, _WIDTH, dtype=torch.int64, device=HOST)
        self._coming: list[Posted] = []
        self._leaving: list[Posted] = []

    def round(
        self, numbers: Sequence[float], dtype: torch.dtype = torch.int64
    ) -> list[list[float]]:
        """The numbers of every worker, by worker; all call it.

        Args:
            numbers: Those of this worker; all tell as many.
            dtype: One of 64 bits.

        Raises:
            PeerLostError: A process that is needed for it is gone.
        """
        mine = torch.zeros(_WIDTH, dtype=dtype, device=HOST)
        mine[: len(numbers)] = torch.tensor(numbers, dtype=dtype, device=HOST)
        line = mine.view(torch.int64)
        heard = self._hear_and_tell(line) if self._is_host else self._tell_and_hear(line)
        found: list[list[float]] = heard.view(dtype)[:, : len(numbers)].tolist()
        return found

    def _hear_and_tell(self, line: Tensor) -> Tensor:
        if not self._coming:  # the first round
            self._listen(self._rows[1:])
        _wait(self._coming)
        # Not written into: what is made in inference mode must not be, outside of it.
        heard = torch.cat([line.unsqueeze(0), self._rows[1:]])
        self._tell(heard)
        self._listen(self._rows[1:])
        return heard

    def _tell_and_hear(self, line: Tensor) -> Tensor:
        self._listen([self._rows])
        self._tell(line)
        _wait(self._coming)
        return self._rows

    def _listen(self, lines: Iterable[Tensor]) -> None:
        for peer, line in zip(self._peers, lines, strict=True):
            self._coming.append(peer.receive(line, _TAG, on_host=True))

    def _tell(self, line: Tensor) -> None:
        _wait(self._leaving)  # of the round before
        for peer in self._peers:
            self._leaving.append(peer.send(line, _TAG, on_host=True))


def _wait(all_posted: list[Posted]) -> None:
    for posted in all_posted:
        posted.wait()
    all_posted.clear()
