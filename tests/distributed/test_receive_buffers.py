"""Law 7 with a process for each worker: what is received ahead, and what is held of it."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe.execution import parcel
from tests.distributed.four_ranks import four_ranks
from tests.distributed.laws import Way, piped
from tests.laws.parts import Leave, Meet

pytestmark = pytest.mark.distributed


class Seen:
    """Counts what has been posted and not been waited for, and what is still held of it."""

    def __init__(self) -> None:
        self.ahead: Counter[bool] = Counter()
        self.peak_ahead: Counter[bool] = Counter()
        self.peak_held = 0
        self._memory: list[StorageWeakRef] = []

    def posted(self, bound: parcel.Bound) -> None:
        kind = bound._form.is_boundary
        self.ahead[kind] += 1
        self.peak_ahead[kind] = max(self.peak_ahead[kind], self.ahead[kind])
        if kind:
            (landing,) = bound._landings
            self._memory.append(StorageWeakRef(landing._tensor.untyped_storage()))
            self.peak_held = max(self.peak_held, sum(not each.expired() for each in self._memory))

    def waited(self, bound: parcel.Bound) -> None:
        self.ahead[bound._form.is_boundary] -= 1


def watched(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    make, wait = parcel.Bound.__init__, parcel.Bound.wait

    def making(bound, *args):
        make(bound, *args)
        seen.posted(bound)

    def waiting(bound):
        seen.waited(bound)
        return wait(bound)

    monkeypatch.setattr(parcel.Bound, "__init__", making)
    monkeypatch.setattr(parcel.Bound, "wait", waiting)


NUM_WORKERS, NUM_MICROBATCHES = 4, 32


def buffers(rank: int, checkpoint: str) -> tuple[dict[bool, int], int]:
    way = Way("1f1b", NUM_WORKERS, NUM_WORKERS, checkpoint)
    module = nn.Sequential(*(nn.Linear(6, 6) for _ in range(NUM_WORKERS)))
    return seen_in(module, way, rank)


def with_a_skip(rank: int) -> tuple[dict[bool, int], int]:
    """A wide one beside the boundary from the first stage to the second."""
    layers = [nn.Linear(6, 6) for _ in range(NUM_WORKERS - 2)]
    module = nn.Sequential(Leave(), Meet(), *layers)
    return seen_in(module, Way("1f1b", NUM_WORKERS, NUM_WORKERS, "never"), rank)


def seen_in(module: nn.Sequential, way: Way, rank: int) -> tuple[dict[bool, int], int]:
    with piped(module, way, chunks=NUM_MICROBATCHES) as model:
        x, is_last = torch.ones(64, 6), rank == NUM_WORKERS - 1
        step = partial(model.step, x if rank == 0 else None, x if is_last else None, nn.MSELoss())
        step()
        step()
        seen = Seen()
        with pytest.MonkeyPatch.context() as monkeypatch:
            watched(seen, monkeypatch)
            step()
        return dict(seen.peak_ahead), seen.peak_held


def test_nothing_is_posted_while_the_skip_beside_a_boundary_comes_in(request):
    for worker, (ahead, _) in enumerate(four_ranks(request).call(with_a_skip)):
        # Two payloads of one micro-batch, never those of two.
        allowed = {True: 2 if worker == 1 else 1, False: 2 if worker == 0 else 1}
        assert all(number <= allowed[kind] for kind, number in ahead.items()), (worker, ahead)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_receive_buffers_are_what_the_schedule_holds_and_one_more(request, checkpoint):
    for worker, (ahead, held) in enumerate(four_ranks(request).call(buffers, checkpoint)):
        assert all(number <= 1 for number in ahead.values()), (worker, ahead)
        assert held <= (NUM_WORKERS - worker + 1 if worker else 0), (worker, held)
