"""Starts real processes, one a rank, and brings back what each returns."""

import os
import pickle
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any, NamedTuple

from tests.distributed import rank as rank_side

__all__ = ["Outcome", "outcomes", "run"]

GRACE_S = 5.0  # for the other ranks, once one has failed
END_S = 10.0  # from a rank's report to the end of its process


class Outcome(NamedTuple):
    """How a rank has ended: with a result or an error, so many seconds after the start."""

    result: Any
    error: Exception | None
    after_s: float


def run(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float | None = GRACE_S,
) -> list[Any]:
    """Call `function(rank, *args)` in processes of their own, which are one gloo group.

    Every process has one intra-op thread, and warnings are errors. When this returns or raises,
    none of them lives. Results travel by pickle, as do `args`; each rank has its own copy. A rank
    cannot use `multiprocessing` itself.

    Args:
        function: Stands in a module, under its name.
        num_ranks: How many processes.
        args: The other arguments of each call.
        timeout_s: What all of it may take, the start of the processes (seconds each) included.
        grace_s: How long the others may go on after the first has failed; None: until the timeout.

    Returns:
        The results by rank.

    Raises:
        Exception: That of the rank that failed first, as itself where pickle can carry it; notes
            have its traceback, and how others have failed.
        TimeoutError: Ranks were not done in time; notes have what their threads were at.
    """
    every = outcomes(function, num_ranks, *args, timeout_s=timeout_s, grace_s=grace_s)
    failed = [rank for rank, outcome in enumerate(every) if outcome.error is not None]
    if not failed:
        return [outcome.result for outcome in every]
    failed.sort(key=lambda rank: every[rank].after_s)
    first = every[failed[0]].error
    assert first is not None
    for rank in failed[1:]:
        error = every[rank].error
        first.add_note(f"Afterwards, in rank {rank}: {type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            first.add_note(note)
    raise first


def outcomes(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float | None = None,
) -> list[Outcome]:
    """The same as `run` for tests of failures: how each rank has ended, and nothing is raised."""
    call = pickle.dumps((function, args))
    deadline_s = monotonic() + timeout_s
    ranks: list[_Rank] = []
    with TemporaryDirectory() as folder:
        try:
            ranks.extend(
                _Rank(rank_side.Job(rank, num_ranks, folder, timeout_s, call))
                for rank in range(num_ranks)
            )
            found = _collected(ranks, deadline_s, grace_s)
        finally:
            for each in ranks:
                each.kill()
    return [found[rank] for rank in range(num_ranks)]


class _Rank:
    """A process, seen from outside."""

    def __init__(self, job: rank_side.Job) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe(duplex=False)
        self._job = job
        self._start_s = monotonic()
        # A daemon, so that it ends with the parent if even `finally` is not reached.
        self._process = context.Process(target=rank_side.main, args=(job, theirs), daemon=True)
        self._process.start()
        theirs.close()  # the only other end is now in the process: its death is an end of file

    def ended(self) -> Outcome:
        """Its own report, or that there is none."""
        after_s = monotonic() - self._start_s
        result, error = self._report()
        self._process.join(END_S)
        if error is None and self._process.exitcode != 0:
            error = RuntimeError(self._strange_end())
        return Outcome(result, error, after_s)

    def hung(self) -> Outcome:
        """What it is at, since it is not done."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, signal.SIGUSR1)
        sleep(0.2)  # it writes its stacks
        error = TimeoutError(f"Rank {self._job.rank} was not done in time.")
        stacks = Path(self._job.stacks_path)
        if stacks.exists():
            error.add_note(f"Rank {self._job.rank} was here:\n{stacks.read_text()}")
        return Outcome(None, error, monotonic() - self._start_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.connection.close()

    def _report(self) -> tuple[Any, Exception | None]:
        try:
            report = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            return None, None
        if report.error is not None:
            report.error.add_note(f"In rank {self._job.rank}:\n{report.traceback}")
        return report.result, report.error

    def _strange_end(self) -> str:
        code = self._process.exitcode
        if code is None:
            return f"Rank {self._job.rank} has returned, but its process did not end."
        return f"Rank {self._job.rank} ended with exit code {code} and reported no error."


def _collected(ranks: list[_Rank], deadline_s: float, grace_s: float | None) -> dict[int, Outcome]:
    """The outcomes by rank; those that are not done in time are hung."""
    found = {}
    running: dict[Connection, int] = {each.connection: rank for rank, each in enumerate(ranks)}
    while running and (ready := wait(list(running), max(0.0, deadline_s - monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = running.pop(connection)
            found[rank] = ranks[rank].ended()
            if found[rank].error is not None and grace_s is not None:
                deadline_s = min(deadline_s, monotonic() + grace_s)
    return found | {rank: ranks[rank].hung() for rank in running.values()}
