"""The processes of a mesh, which fail together."""

import atexit
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock
from time import sleep
from typing import Protocol
from weakref import WeakSet

from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh

from gpipe.execution.agreement import require_agreement
from gpipe.execution.failure import Failure
from gpipe.execution.hard_end import end_hard
from gpipe.execution.watch import Watch

__all__ = ["Company", "Member", "company_of"]

_HEARD_AFTER_S = 2.0  # a watch looks once a second


class Member(Protocol):
    """What may be waiting for other processes."""

    def interrupt(self, error: BaseException) -> None:
        """Let what waits raise this error."""

    def progress(self) -> tuple[int, str | None]:
        """A number that changes with every wait, and what is waited for."""

    @property
    def has_lost_worker(self) -> bool:
        """Whether a thread of it waits for ever."""


class Company:
    """One watch for all models of this process on the same ranks.

    Args:
        store: What all of them share.
        ranks: Those of the job, of which this process is one.
        patience_s: For how long a rank may give no sign of life.
        watchdog_s: For how long nothing may move until stderr tells what every rank waits for.
    """

    def __init__(
        self, store: Store, ranks: Sequence[int], patience_s: float, watchdog_s: float | None
    ) -> None:
        self.rank = list(ranks).index(dist.get_rank())
        self._store, self._ranks = store, ranks
        self._members: WeakSet[Member] = WeakSet()
        self._lock = Lock()
        # Before the watch is made, so that it runs after the watch has said farewell.
        atexit.register(self._leave_lost_workers)
        # Ranks of another mesh must not be taken for these.
        own = PrefixStore(f"gpipe/{','.join(map(str, ranks))}", store)
        self._watch = Watch(
            own,
            self.rank,
            len(ranks),
            patience_s=patience_s,
            on_failure=self._interrupt,
            progress=self._progress,
            watchdog_s=watchdog_s,
        )

    def join(self, member: Member) -> None:
        """Interrupt this one, too, when another rank has failed."""
        with self._lock:
            self._members.add(member)

    def require_agreement(self, facts: Mapping[str, str | int]) -> None:
        """Compare what has to be the same on all ranks; all of them call it.

        Raises:
            ConfigError: Something differs; all ranks raise the same.
            StageError: A rank has not come.
        """
        name = ",".join(map(str, self._ranks))
        ranks = self.rank, len(self._ranks)
        look = self._require_nothing_failed
        require_agreement(self._store, *ranks, facts, name=name, look=look)

    @contextmanager
    def sharing_failures(self) -> Iterator[None]:
        """Tell the others what is raised meanwhile, and raise what has failed elsewhere.

        Raises:
            StageError: Another rank has failed first.
        """
        self._require_nothing_failed()
        try:
            yield
        except BaseException as error:
            first = self._watch.report(error)
            _let_others_tell()
            # What all ranks refuse alike, each refuses as itself.
            if first.rank != self.rank and first.error != Failure.of(self.rank, error).error:
                raise first.as_error() from error
            raise

    def leave(self) -> None:
        """End in good order, while others may go on."""
        self._watch.leave()

    def _require_nothing_failed(self) -> None:
        failure = self._watch.failure
        if failure is not None:
            self._watch.acknowledge()
            raise failure.as_error()

    def _interrupt(self, failure: Failure) -> None:
        for member in self._present():
            member.interrupt(failure.as_error())

    def _progress(self) -> tuple[int, str | None]:
        every = [member.progress() for member in self._present()]
        waiting = [text for _, text in every if text is not None]
        return sum(number for number, _ in every), waiting[0] if waiting else None

    def _leave_lost_workers(self) -> None:
        # A thread that comes back out of the backend while the interpreter ends would abort it.
        if any(member.has_lost_worker for member in self._present()):
            end_hard()

    def _present(self) -> list[Member]:
        with self._lock:
            return list(self._members)


def _let_others_tell() -> None:
    # torchrun ends all processes as soon as one has ended: before the others have heard of it.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sleep(_HEARD_AFTER_S)


def company_of(
    mesh: DeviceMesh, patience_s: float = 8.0, watchdog_s: float | None = None
) -> Company:
    """That of the ranks of a mesh; the same for each model."""
    store = dist.distributed_c10d._get_default_store()
    return _company(store, tuple(mesh.mesh.flatten().tolist()), patience_s, watchdog_s)


@cache
def _company(
    store: Store, ranks: tuple[int, ...], patience_s: float, watchdog_s: float | None
) -> Company:
    return Company(store, ranks, patience_s, watchdog_s)
