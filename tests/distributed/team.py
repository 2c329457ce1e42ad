"""Processes that stay, and make one call after the other: starting them takes seconds."""

import pickle
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing import get_context

from tests.distributed import rank as rank_side

__all__ = ["Team", "mesh"]

GRACE_S = 5.0  # for the other ranks, once one has failed
LIFE_S = 600.0  # of a group, more than all tests of a module take


@cache
def mesh() -> DeviceMesh:
    """In a rank: all processes of the team as one pipe."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pipe",))


class Team:
    """So many ranks in one gloo group; started by the first call, and anew after a failure.

    Args:
        num_ranks: How many.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._members: list[_Member] = []
        self._folder: TemporaryDirectory[str] | None = None

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call `function(rank, *args)` in all ranks; the results by rank.

        Raises:
            Exception: That of the rank that failed first; no rank lives then.
            TimeoutError: A rank was not done in time.
        """
        self._start()
        for member in self._members:
            member.calls.send_bytes(pickle.dumps((function, args)))
        reports = self._reports(monotonic() + timeout_s)
        errors = [report.error for report in reports.values() if report.error is not None]
        if not errors and len(reports) == self.num_ranks:
            return [reports[rank].result for rank in range(self.num_ranks)]
        missing = sorted(set(range(self.num_ranks)) - set(reports))
        self.close()
        raise errors[0] if errors else TimeoutError(f"Ranks {missing} were not done in time.")

    def close(self) -> None:
        """End all ranks."""
        for member in self._members:
            member.kill()
        self._members.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        if not self._members:
            self._folder = TemporaryDirectory()
            call = pickle.dumps((_serve, ()))
            for rank in range(self.num_ranks):
                job = rank_side.Job(rank, self.num_ranks, self._folder.name, LIFE_S, call)
                self._members.append(_Member(job))

    def _reports(self, deadline_s: float) -> dict[int, rank_side.Report]:
        """By rank, in the order in which they came."""
        found: dict[int, rank_side.Report] = {}
        running = {member.reports: rank for rank, member in enumerate(self._members)}
        while running and (ready := wait(list(running), max(0.0, deadline_s - monotonic()))):
            for connection in ready:
                rank = running.pop(connection)
                found[rank] = self._members[rank].report()
                if found[rank].error is not None:
                    deadline_s = min(deadline_s, monotonic() + GRACE_S)
        return found


class _Member:
    """A rank, seen from outside."""

    def __init__(self, job: rank_side.Job) -> None:
        context = get_context("spawn")
        self._rank = job.rank
        self.reports, reports = context.Pipe(duplex=False)
        calls, self.calls = context.Pipe(duplex=False)
        # A daemon, so that it ends with the parent if `close` is not reached.
        self._process = context.Process(target=_main, args=(job, reports, calls), daemon=True)
        self._process.start()
        reports.close()  # the only other end is now in the process: its death is an end of file
        calls.close()

    def report(self) -> rank_side.Report:
        try:
            report: rank_side.Report = pickle.loads(self.reports.recv_bytes())
        except EOFError:
            error = RuntimeError(f"Rank {self._rank} has ended and reported no error.")
            return rank_side.Report(error=error)
        if report.error is not None:
            report.error.add_note(f"In rank {self._rank}:\n{report.traceback}")
        return report

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.reports.close()
        self.calls.close()


_here: list[Connection] = []  # in a rank: the ends of its pipes


def _main(job: rank_side.Job, reports: Connection, calls: Connection) -> None:
    _here[:] = reports, calls
    rank_side.main(job, reports)


def _serve(rank: int) -> None:
    reports, calls = _here
    while True:
        function, args = pickle.loads(calls.recv_bytes())
        torch.manual_seed(0)
        try:
            report = pickle.dumps(rank_side.Report(function(rank, *args)))
        except BaseException as error:  # noqa: BLE001 - it is reported, whatever it is
            report = pickle.dumps(rank_side._failure(error))
        reports.send_bytes(report)
