"""One rank fails, and the whole job ends: soon, and with the name of the first on every stderr."""

import itertools
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import distributed as dist

from gpipe.errors import StageError
from gpipe.execution.failure import Failure, is_of_the_wire
from tests.processes import running

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
KILLED = -9
SOON_S = 20  # with quick beats, on cores that have other things to do; see `test_the_promises`
STORES = ("rank_0", "parent", "file")


class End(NamedTuple):
    code: int
    after_s: float
    err: str
    out: str


def carried_out(folder, names, num_at_once=6):
    """The jobs, several at the same time: how each rank of each has ended."""
    program = [sys.executable, "-m", "tests.execution.watch_job", str(folder), str(num_at_once)]
    ran = subprocess.run(
        [*program, *names], cwd=ROOT, timeout=200, check=False, capture_output=True
    )
    assert ran.returncode == 0, ran.stderr.decode()
    return {name: ends(folder / str(number)) for number, name in enumerate(names)}


def ends(folder):
    mark = folder / "mark"
    start_s = float(mark.read_text()) if mark.exists() else 0.0
    found = []
    for rank in range(3):
        end = json.loads((folder / f"{rank}.end").read_text())
        err, out = ((folder / f"{rank}.{stream}").read_text() for stream in ("err", "out"))
        found.append(End(end["code"], end["end_s"] - start_s, err, out))
    return found


def goes_wrong(how, stores=STORES, ranks=range(3)):
    return [f"goes_wrong {rank} {how} {kind}" for rank, kind in itertools.product(ranks, stores)]


RAISES = [
    *goes_wrong("raise_in_main", ["rank_0"]),
    *goes_wrong("raise_in_worker", ["file"], [2]),
    *goes_wrong("interrupt_oneself", ["parent"], [1]),
]
KILLS = [
    *goes_wrong("kill_oneself", ["rank_0"]),
    *goes_wrong("kill_oneself", ["parent"], [0]),
    *goes_wrong("kill_oneself", ["file"], [2]),
]
HANGS = goes_wrong("stop_oneself", ["rank_0", "parent"], [0])
EXITS = goes_wrong("exit_3", ["parent"], [0]) + goes_wrong("exit_3", ["rank_0"], [0, 2])
GLOO = ["over_gloo 0 kill_oneself", "over_gloo 2 exit_3", "over_gloo 1 raise_in_main"]
ORDERLY = [f"good_order {kind}" for kind in STORES]
REST = ["stuck rank_0", "body_of_with", "stall", "all_are_held"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    names = RAISES + KILLS + HANGS + EXITS + GLOO + ORDERLY + REST
    return carried_out(tmp_path_factory.mktemp("jobs"), names)


def the_others(job, culprit):
    return [end for rank, end in enumerate(job) if rank != culprit]


def assert_all_name(job, culprit, fact, within_s):
    for end in the_others(job, culprit):
        assert fact in end.err
        assert end.code == 1
        assert end.after_s < within_s
        assert end.err.count("ends, since another has failed") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", RAISES)
def test_an_exception_ends_every_rank(jobs, name):
    culprit = int(name.split()[1])
    fact = {
        "raise_in_main": "failed first: ValueError: no data",
        "raise_in_worker": "failed first in stage 1, layer 3 ('3', Linear), micro-batch 5, forward:"
        " ValueError: no weights",
        "interrupt_oneself": "failed first: KeyboardInterrupt",
    }[name.split()[2]]
    assert_all_name(jobs[name], culprit, f"Rank {culprit} {fact}", SOON_S)
    failed = jobs[name][culprit]
    assert failed.code != 0
    assert "another has failed" not in failed.err
    assert "Error: no" in failed.err or "KeyboardInterrupt" in failed.err
    assert "gpipe.errors.StageError: Rank" in the_others(jobs[name], culprit)[0].err


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLS + HANGS)
def test_a_rank_that_is_killed_or_stopped_ends_every_rank(jobs, name):
    _, culprit, how, kind = name.split()
    if (culprit, kind) == ("0", "rank_0"):
        fact = "The store failed first: its host " + (
            "is gone" if how == "kill_oneself" else "does not answer"
        )
    else:
        fact = f"Rank {culprit} failed first: it has given no sign of life for 3 s"
    assert_all_name(jobs[name], int(culprit), fact, 2 * SOON_S if "not answer" in fact else SOON_S)
    assert jobs[name][int(culprit)].code == KILLED


@pytest.mark.slow
@pytest.mark.parametrize("name", EXITS)
def test_a_script_that_has_ended_while_all_others_wait_for_it_has_failed(jobs, name):
    culprit = int(name.split()[1])
    fact = f"Rank {culprit} failed first: it has ended its script, but rank "
    assert_all_name(jobs[name], culprit, fact, SOON_S)
    assert jobs[name][culprit].code == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", GLOO)
def test_a_broken_connection_is_not_taken_for_the_cause(jobs, name):
    _, culprit, how = name.split()
    fact = {
        "kill_oneself": "it has given no sign of life",
        "exit_3": "it has ended its script, but ",  # somebody waits, or has lost the connection
        "raise_in_main": "ValueError: no data",
    }[how]
    assert_all_name(jobs[name], int(culprit), f"Rank {culprit} failed first: {fact}", SOON_S)


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERLY)
def test_ranks_that_leave_in_good_order_end_nobody(jobs, name):
    assert [(end.code, end.err) for end in jobs[name]] == [(0, "")] * 3
    first, _, last = jobs[name]
    assert first.after_s < last.after_s


@pytest.mark.slow
def test_a_main_thread_that_is_stuck_elsewhere_is_ended(jobs):
    in_step, failed, elsewhere = jobs["stuck rank_0"]
    assert [in_step.code, failed.code, elsewhere.code] == [1, 1, 1]
    assert elsewhere.after_s < SOON_S
    assert "Rank 1 failed first: ValueError: no data" in elsewhere.err
    assert "main thread has not come back within 1 s. It was at " in elsewhere.err
    assert "in stuck" in elsewhere.err
    assert elsewhere.out == "unflushed\n"


@pytest.mark.slow
def test_the_body_of_with_reports_an_exit_with_a_code(jobs):
    assert_all_name(jobs["body_of_with"], 1, "Rank 1 failed first: SystemExit: 3", SOON_S)
    assert jobs["body_of_with"][1].code == 3


@pytest.mark.slow
def test_one_rank_tells_once_a_standstill_what_all_wait_for(jobs):
    first, *others = jobs["stall"]
    assert [end.code for end in jobs["stall"]] == [0, 0, 0]
    assert [end.err for end in others] == ["", ""]
    tables = first.err.split("gpipe: ")[1:]
    assert [table.count("\n") for table in tables] == [4, 4]
    for table, what in zip(tables, "ab", strict=True):
        assert f"  rank 0: rank 0 waits for {what}\n" in table
        assert f"  rank 1: rank 1 waits for {what}\n" in table
        assert "  rank 2: does not wait\n" in table


@pytest.mark.slow
def test_a_job_that_was_stopped_as_a_whole_goes_on(jobs):
    assert [(end.code, end.err) for end in jobs["all_are_held"]] == [(0, "")] * 3


@pytest.mark.slow
def test_the_promises(tmp_path):
    """With the times that hold where none are given."""
    kills = [f"promised {rank} kill_oneself {kind}" for rank in range(3) for kind in STORES]
    raises = [f"promised {rank} raise_in_main {kind}" for rank in range(3) for kind in STORES]
    # Most of what they take is the end of an interpreter, and cores are few.
    for names, within_s, num_at_once in (raises, 5, 1), (kills, 15, 5):
        folder = tmp_path / str(within_s)
        folder.mkdir()
        for name, job in carried_out(folder, names, num_at_once).items():
            culprit = int(name.split()[1])
            for end in the_others(job, culprit):
                assert end.code == 1
                assert end.after_s < within_s, name
                assert "failed first" in end.err
                assert f"ank {culprit}" in end.err


def test_a_failure_travels_as_text():
    error = KeyError("x")
    error.add_note("gpipe: in stage 1, layers 3 to 5, micro-batch 7, backward")
    failure = Failure.of(2, error)
    where = "in stage 1, layers 3 to 5, micro-batch 7, backward"
    assert failure == (2, "KeyError: 'x'", where, 1, 7, "backward")
    assert Failure.from_json(failure.to_json()) == failure
    assert str(failure) == f"Rank 2 failed first {where}: KeyError: 'x'"
    assert Failure.of(0, KeyboardInterrupt()) == Failure(0, "KeyboardInterrupt")


def test_an_error_whose_text_fails_is_told_by_its_class():
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError

    assert Failure.of(0, MuteError()).error == "MuteError"


def test_the_error_of_the_others_goes_through_pickle():
    error = pickle.loads(pickle.dumps(Failure(2, "ValueError: no").as_error()))
    assert isinstance(error, StageError)
    assert error.rank == 2
    assert str(error).startswith("Rank 2 failed first: ValueError: no\n")


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]"), True),
        (dist.DistBackendError("NCCL error"), True),
        (ConnectionResetError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError("Connection closed"), False),
    ],
)
def test_errors_of_connections_are_told_from_others(error, is_it):
    assert is_of_the_wire(error) is is_it


@pytest.mark.slow
def test_nothing_of_a_job_stays_behind(jobs):
    assert running("watch_job") == []
