"""One rank fails in `GPipe.step` or beside it, and all end soon and say which (CASES 28, 29).

Each rank is a process whose interpreter ends by itself; times are from what goes wrong to the end
of the process. All kinds of failure on all ranks, with every kind of store, are slow:

    ./scripts/test --slow tests/distributed/test_failures.py
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.failing_job import DIFFERENCES
from tests.execution.test_watch import End, ends
from tests.processes import running

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
AFTER_RAISE_S, AFTER_DEATH_S = 5.0, 15.0  # are promised
RANKS, STORES = range(3), ("rank_0", "parent", "file")

LAYER = "in stage {0}, layer {1} ('{1}', Faulty), micro-batch 2, "
RAISED = {
    "forward": (LAYER + "forward", "ValueError: bad forward"),
    "recompute": (LAYER + "recompute", "ValueError: bad recompute"),
    "backward": (
        "in stage {0}, layers {2} to {1}, micro-batch 2, backward",
        "ValueError: bad back",
    ),
    "loss": ("in stage {0}, the loss, micro-batch 2, recompute", "ValueError: bad loss"),
    "data": ("", "ValueError: no data"),
    "clip": ("", "ValueError: bad clip"),
    "interrupt": ("", "KeyboardInterrupt"),
    "columns": (
        "in stage 0, layer 0 ('0', Linear), micro-batch 0, forward",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)",
    ),
    "no_rows": ("", "ValueError: The mini-batch has 0 rows: there is nothing to train on."),
}
"""How a rank can fail: where that is, and what it raises."""

DIED = {"exit_7": 7, "kill": -9}
ONLY_ON = {"loss": [2], "columns": [0], "no_rows": [0]}

RAISES = [
    "forward 0 rank_0",
    "recompute 1 parent",
    "backward 1 rank_0",
    "loss 2 parent",
    "data 0 rank_0",
    "data 2 parent",
    "clip 0 rank_0",
    "clip 1 parent",
    "interrupt 1 rank_0",
    "columns 0 rank_0",
    "no_rows 0 parent",
]
DEATHS = ["kill 0 rank_0", "kill 1 rank_0", "kill 0 parent", "kill 2 parent", "exit_7 1 parent"]
REST = ["other_rows 2 rank_0", "nap 1 parent", "insist 1 parent", "differ 0 rank_0"]


def carried_out(folder: Path, names: list[str], num_at_once: int = 8) -> dict[str, list[End]]:
    """The jobs, several at the same time: how each rank of each has ended."""
    program = [sys.executable, "-m", "tests.distributed.failing_job", str(folder), str(num_at_once)]
    ran = subprocess.run(
        [*program, *names], cwd=ROOT, timeout=500, check=False, capture_output=True
    )
    assert ran.returncode == 0, ran.stderr.decode()
    return {name: ends(folder / str(number)) for number, name in enumerate(names)}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[End]]:
    # Those who wait for a sign of life do so while the others work.
    return carried_out(tmp_path_factory.mktemp("jobs"), DEATHS + REST + RAISES)


def said_by_us(end: End) -> str:
    """Without what torch says where names of hosts are not known."""
    return "".join(line for line in end.err.splitlines(True) if "[c10d]" not in line)


def assert_all_name(job: list[End], culprit: int, fact: str, within_s: float) -> None:
    for rank, end in enumerate(job):
        if rank != culprit:
            assert fact in end.err
            assert end.code == 1
            assert end.after_s < within_s
            assert end.err.count("ends, since another has failed") == 1


def assert_raise_ends_all(job: list[End], name: str) -> None:
    how, rank, _ = name.split()
    culprit = int(rank)
    place, error = (each.format(rank, 2 * culprit + 1, 2 * culprit) for each in RAISED[how])
    said = f"{place}: {error}" if place else f": {error}"
    fact = f"Rank {rank} failed first{' ' if place else ''}{said}"
    assert_all_name(job, culprit, fact, AFTER_RAISE_S)
    failed = job[culprit]
    assert failed.code == (-2 if how == "interrupt" else 1)
    assert "Traceback" in failed.err
    assert error in failed.err
    assert place in failed.err  # as a note
    assert "failed first" not in failed.err


def assert_death_ends_all(job: list[End], name: str) -> None:
    how, rank, store = name.split()
    if (rank, store) == ("0", "rank_0"):
        fact = "The store failed first: its host is gone: it was killed, or has ended without a word. It is rank 0"  # noqa: E501
    else:
        fact = f"Rank {rank} failed first: it has given no sign of life for 8 s: it was killed"
    assert_all_name(job, int(rank), fact, AFTER_DEATH_S)
    assert job[int(rank)].code == DIED[how]


@pytest.mark.parametrize("name", RAISES)
def test_whatever_a_rank_raises_ends_every_rank(jobs, name):
    assert_raise_ends_all(jobs[name], name)


@pytest.mark.parametrize("name", DEATHS)
def test_a_rank_that_dies_ends_every_rank(jobs, name):
    assert_death_ends_all(jobs[name], name)


# Rank 2 has a row less; the sizes are compared, so nobody has failed first.
def test_what_all_ranks_refuse_each_refuses_as_itself(jobs):
    for end in jobs["other_rows 2 rank_0"]:
        assert end.code == 1
        assert end.after_s < AFTER_RAISE_S
        said = "ValueError: The target on worker 2 has 7 rows and the input has 8. Pass both"
        assert said in end.err.splitlines()[-1]


def test_whoever_catches_the_error_and_goes_on_gets_it_again(jobs):
    said = (
        "StageError: Rank 1 failed first in stage 1, layer 3 ('3', Faulty), micro-batch 2, forward"
    )
    for rank, end in enumerate(jobs["insist 1 parent"]):
        first, again = json.loads(end.out)
        assert first.startswith("ValueError: bad forward" if rank == 1 else said)
        assert again.startswith(said)


def test_a_layer_that_takes_long_is_told_and_waited_for(jobs):
    first, *others = jobs["nap 1 parent"]
    assert [end.code for end in (first, *others)] == [0, 0, 0]
    assert [said_by_us(end) for end in others] == ["", ""]
    assert said_by_us(first) == (
        "gpipe: rank 0 has waited for 2 s, and waits on.\n"
        "  rank 0: worker 0 waits for G0<1.1\n"
        "  rank 1: does not wait\n"
        "  rank 2: worker 2 waits for A2<1.2\n"
    )


# CASES 29. Afterwards the same processes train.
def test_ranks_that_differ_are_all_told_before_the_first_step(jobs):
    ended = jobs["differ 0 rank_0"]
    assert [(end.code, said_by_us(end)) for end in ended] == [(0, "")] * 3
    first, *others = [json.loads(end.out) for end in ended]
    assert others == [first, first]
    assert list(first) == list(DIFFERENCES)
    for fact, (usual, other) in DIFFERENCES.items():
        assert first[fact].startswith(f"The ranks differ in {fact}: ")
        for options, ranks in (usual, "ranks 0, 1"), (other, "rank 2"):
            if "schedule" not in options:  # of which the order is told by a digest
                (value,) = options.values()
                assert f"{value} on {ranks}" in first[fact].replace('"', "")


def test_nothing_of_a_job_stays_behind(jobs):
    assert running("failing_job") == []


@pytest.mark.slow
def test_all_kinds_of_failure_on_all_ranks(tmp_path):
    names = [
        " ".join((how, str(rank), store))
        for how, rank, store in itertools.product([*RAISED, *DIED], RANKS, STORES)
        if rank in ONLY_ON.get(how, RANKS)
    ]
    for name, job in carried_out(tmp_path, names).items():
        (assert_death_ends_all if name.split()[0] in DIED else assert_raise_ends_all)(job, name)


# The others compare arguments with a rank that has none, or wait for it to make groups.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["balance 1 parent", "balance 0 rank_0"])
def test_a_model_that_one_rank_cannot_make_ends_every_rank(tmp_path, name):
    (job,) = carried_out(tmp_path, [name]).values()
    rank = name.split()[1]
    fact = f"ank {rank} failed first: ValueError: balance is [2, 2, 1], which is 5 layers"
    assert_all_name(job, int(rank), fact, AFTER_RAISE_S)
