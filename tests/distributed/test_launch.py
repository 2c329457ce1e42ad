"""Processes that are started for tests: what comes back of them, and that none stays behind."""

import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from tests.distributed.launch import outcomes, run

pytestmark = pytest.mark.distributed


def summed(rank, tensor):
    total = tensor * rank
    dist.all_reduce(total)
    return rank, total, torch.get_num_threads()


@pytest.fixture
def before():
    """The processes of teams that other tests share."""
    return set(multiprocessing.active_children())


def test_results_come_by_rank(before):
    results = run(summed, 3, torch.tensor([1.0, 2.0]))
    assert [(rank, total.tolist(), threads) for rank, total, threads in results] == [
        (rank, [3.0, 6.0], 1) for rank in range(3)
    ]
    assert set(multiprocessing.active_children()) == before


class UnfitError(ValueError):
    """An error with an argument of its own."""


def raise_in_one(rank):
    if rank == 1:
        raise UnfitError("rank 1 does not like it", 7)
    dist.recv(torch.empty(1), src=1)


def test_the_error_of_the_rank_that_failed_first_is_raised_as_itself():
    with pytest.raises(UnfitError, match="does not like it") as caught:
        run(raise_in_one, 2)
    assert caught.value.args[1] == 7
    where, other, _ = caught.value.__notes__
    assert where.startswith("In rank 1:\nTraceback")
    assert ", in raise_in_one\n" in where
    assert other.startswith("Afterwards, in rank 0: ")


class PickyError(Exception):
    """Cannot be made again from what it is pickled as."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def hang_here():
    time.sleep(1000)


def end_in_many_ways(rank):
    dist.barrier()
    if rank == 0:
        hang_here()
    if rank == 1:
        os._exit(7)
    if rank == 2:
        sys.exit("enough")
    if rank == 3:
        raise PickyError("one", "two")
    return os.getpid()


def test_each_rank_has_an_outcome_however_it_ends(before):
    hung, died, left, picky, fine = outcomes(end_in_many_ways, 5, grace_s=2)
    assert "Rank 0 was not done in time" in str(hung.error)
    assert "in hang_here" in hung.error.__notes__[0]
    assert "Rank 1 ended with exit code 7 and reported no error" in str(died.error)
    assert str(left.error) == "SystemExit: enough"
    assert str(picky.error) == "PickyError: one two"
    assert fine.error is None
    assert died.after_s < hung.after_s
    assert set(multiprocessing.active_children()) == before
    assert not lives(fine.result)


def lives(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def say_and_hang(rank, path):
    partial = path.with_suffix(".partial")
    partial.write_text(str(os.getpid()))
    partial.rename(path)
    hang_here()


@pytest.mark.slow
def test_ranks_end_with_a_parent_that_is_killed(tmp_path):
    path = tmp_path / "pid"
    program = f"""
from pathlib import Path
from tests.distributed import launch, test_launch
launch.run(test_launch.say_and_hang, 1, Path({str(path)!r}))
"""
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", program], cwd=root) as parent:
        wait_until(path.exists)
        parent.kill()
    pid = int(path.read_text())
    wait_until(lambda: not lives(pid))


def wait_until(is_true, timeout_s=30):
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
