"""Laws 6 and 7 over time: a thousand steps leave no thread, no tensor and no memory behind."""

import gc
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe
from tests.members import FACES, intra_op_threads, train_once

NUM_STEPS = 1000
NUM_WARM_UP = 400  # the second half of them under tracemalloc, which takes a while to settle
FAIL_EVERY = 41  # odd, so that both faces fail
ROWS, WIDTH = 6, 64
LIMIT_BYTES = 50 * (NUM_STEPS - NUM_WARM_UP)  # of Python objects: less than one small one a step
LIMIT_RESIDENT_BYTES = 8 << 20  # a step makes 60 KiB of activations, maybe unseen by Python


class Fails(nn.Module):
    """Fails in a forward, a recompute or a backward, when its countdown of calls is over."""

    def __init__(self) -> None:
        super().__init__()
        self.calls_left = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        if x.requires_grad:
            x.register_hook(lambda _: self.count())
        self.count()
        return x

    def count(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise OSError("a bad day")


class Run:
    """A model with all that keeps state, trained through both faces in turn."""

    def __init__(self) -> None:
        self.fails = Fails()
        layers = (
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.1),
            nn.BatchNorm1d(WIDTH),
            self.fails,
            nn.ReLU(inplace=True),
            nn.Linear(WIDTH, WIDTH),
        )
        self.model = GPipe(
            nn.Sequential(*layers), [3, 3], chunks=3, checkpoint="always", deferred_batch_norm=True
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.num_failed = 0

    def steps(self, first: int, last: int) -> None:
        for number in range(first, last):
            self.step(number)
            if number % 10 == 0:
                self.evaluate()

    def step(self, number: int) -> None:
        # Of the nine calls in a mini-batch three are in forwards; which of them fails goes round.
        self.fails.calls_left = number % 9 + 1 if number % FAIL_EVERY == 0 else 0
        x = torch.randn(ROWS, WIDTH)
        try:
            train_once(self.model, FACES[number % 2], x, x, nn.MSELoss())
        except OSError:
            self.num_failed += 1
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        self.model.eval()(torch.randn(ROWS, WIDTH))
        self.model.train()


class Footprint(NamedTuple):
    """What the process has now."""

    threads: set[threading.Thread]
    num_tensors: int
    traced_bytes: int
    resident_bytes: int

    @classmethod
    def now(cls) -> "Footprint":
        gc.collect()
        threads = set(threading.enumerate())
        traced_bytes, _ = tracemalloc.get_traced_memory()
        num_tensors = sum(issubclass(type(each), Tensor) for each in gc.get_objects())
        return cls(threads, num_tensors, traced_bytes, resident_bytes())


def resident_bytes() -> int:
    """0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


@pytest.fixture
def tracing() -> Iterator[None]:
    with intra_op_threads(1):  # faster
        yield
    tracemalloc.stop()


@pytest.mark.usefixtures("tracing")
def test_a_thousand_steps_leave_nothing_behind():
    run = Run()
    run.steps(0, NUM_WARM_UP // 2)
    tracemalloc.start()
    run.steps(NUM_WARM_UP // 2, NUM_WARM_UP)
    before = Footprint.now()
    run.steps(NUM_WARM_UP, NUM_STEPS)
    after = Footprint.now()
    assert run.num_failed == len(range(0, NUM_STEPS, FAIL_EVERY))
    assert after.threads <= before.threads
    assert after.num_tensors <= before.num_tensors
    assert after.traced_bytes - before.traced_bytes < LIMIT_BYTES
    assert after.resident_bytes - before.resident_bytes < LIMIT_RESIDENT_BYTES


@pytest.fixture
def no_search_for_cycles() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_search_for_cycles")
@pytest.mark.parametrize("number", [0, 1, 41, 82, 123])
def test_the_threads_end_at_once_with_the_model(number):
    # A mini-batch that referred to itself kept them until Python's next search for cycles.
    others = set(threading.enumerate())
    run = Run()
    run.steps(number, number + 3)
    assert len(set(threading.enumerate()) - others) == 2
    del run
    assert set(threading.enumerate()) <= others


@pytest.mark.usefixtures("no_search_for_cycles")
def test_an_output_keeps_the_threads_until_its_backward():
    others = set(threading.enumerate())
    run = Run()
    output = run.model(torch.randn(ROWS, WIDTH))
    del run
    assert len(set(threading.enumerate()) - others) == 2
    output.sum().backward()
    assert set(threading.enumerate()) <= others
