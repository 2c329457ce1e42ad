"""What runs in a process that `launch` has started."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Job", "Report", "main"]


class Job(NamedTuple):
    """What a process is told: its place, where files may be, and the pickled call."""

    rank: int
    num_ranks: int
    folder: str
    timeout_s: float
    call: bytes

    @property
    def stacks_path(self) -> str:
        """Where the stacks of its threads are written when it gets SIGUSR1."""
        return str(Path(self.folder, f"stacks_{self.rank}"))


class Report(NamedTuple):
    """What a process tells."""

    result: Any = None
    error: Exception | None = None
    traceback: str = ""


def main(job: Job, connection: Connection) -> None:
    """Make the call and report."""
    threading.Thread(target=_end_with_the_parent, name="launch-watch", daemon=True).start()
    with open(job.stacks_path, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        try:
            report = pickle.dumps(Report(_called(job)))
        except BaseException as error:  # noqa: BLE001 - it is reported, whatever it is
            report = pickle.dumps(_failure(error))
        connection.send_bytes(report)
        faulthandler.unregister(signal.SIGUSR1)


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _called(job: Job) -> Any:
    # Imported here, so that what fails on import is reported, too.
    import torch
    from torch import distributed as dist

    function, args = pickle.loads(job.call)
    torch.set_num_threads(1)
    # A file, and not a port: nobody can take it away, and it outlives each rank.
    store = dist.FileStore(str(Path(job.folder, "store")), job.num_ranks)
    timeout = timedelta(seconds=job.timeout_s)
    dist.init_process_group(
        "gloo", store=store, rank=job.rank, world_size=job.num_ranks, timeout=timeout
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = function(job.rank, *args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _failure(error: BaseException) -> Report:
    """The error as it is, or one that says the same where pickle or the parent cannot take it."""
    text = "".join(traceback.format_exception(error))
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an error may pickle in ways of its own
        copied = None
    if not isinstance(copied, Exception):  # the parent must not end by a rank's SystemExit
        copied = RuntimeError(f"{type(error).__name__}: {error}")
    return Report(error=copied, traceback=text)
