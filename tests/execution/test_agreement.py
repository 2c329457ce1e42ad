"""What differs between ranks is told, alike on all of them."""

import subprocess
import sys

import pytest
from torch import distributed as dist

from gpipe.errors import ConfigError, StageError
from gpipe.execution.agreement import require_agreement
from tests.distributed.launch import outcomes

pytestmark = pytest.mark.distributed


def compare(rank):
    """Several comparisons in one job: the error of each, or None."""
    # Through a group and through a store, whose timeout is not asked for.
    everyone = dist.group.WORLD
    store = dist.PrefixStore("here", everyone.get_group_store())
    odd = rank == 2
    return [
        told(everyone, rank, {"chunks": 8, "schedule": "1f1b"}),
        told(everyone, rank, {"chunks": 4 if odd else 8, "schedule": "x" if odd else "1f1b"}),
        told(store, rank, {"layers": 12, **({"seed": 1} if rank == 1 else {})}),
        told(store, rank, {"number": "8" if odd else 8}),
        told(store, rank, {"chunks": rank}, name=f"alone {rank}", alone=True),
        absent(store, rank),
    ]


def told(where, rank, facts, name="", alone=False):
    try:
        require_agreement(where, 0 if alone else rank, 1 if alone else 4, facts, name=name)
    except ConfigError as error:
        return str(error)
    return None


def absent(store, rank):
    if rank in (1, 3):
        return None
    try:
        require_agreement(store, rank, 4, {}, name="absent", timeout_s=0.5)
    except StageError as error:
        return error.rank, str(error)
    return None


def test_every_rank_raises_the_same_with_each_value():
    every = [outcome.result or outcome.error for outcome in outcomes(compare, 4)]
    same, chunks, seed, number, alone, _ = every[0]
    assert all(each[:5] == every[0][:5] for each in every)
    assert same is None
    assert alone is None
    assert chunks == (
        "The ranks differ in chunks: 8 on ranks 0, 1, 3; 4 on rank 2. Start every rank with the "
        "same program, run file and arguments."
    )
    assert seed.startswith("The ranks differ in seed: nothing on ranks 0, 2, 3; 1 on rank 1.")
    assert number.startswith('The ranks differ in number: 8 on ranks 0, 1, 3; "8" on rank 2.')
    for rank in (0, 2):
        first, text = every[rank][5]
        assert first == 1
        assert text.startswith("Ranks 1, 3 have not come within 0.5 s to compare")


def test_nothing_is_printed_while_ranks_are_awaited():
    # torch writes a warning for each timeout inside of `store.wait`.
    program = """
from torch import distributed as dist
from gpipe.execution.agreement import require_agreement
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
try:
    require_agreement(store, 0, 2, {}, timeout_s=1.5)
except Exception as error:
    assert str(error).startswith("Rank 1 has not come within 1.5 s")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")
