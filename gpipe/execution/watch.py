"""Ends the whole job soon after one rank has failed."""

import itertools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from types import TracebackType
from typing import Self

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from gpipe.execution.ending import Ending
from gpipe.execution.failure import Failure, is_of_the_wire
from gpipe.execution.heartbeat import Beat, Beats
from gpipe.execution.last_words import LastWords
from gpipe.execution.news import News
from gpipe.execution.pulse import Pulse
from gpipe.execution.stall import Progress, Stillness, left_early

__all__ = ["Watch"]

_STORE_IS_SILENT = (
    "its host does not answer: the process is stopped, or its machine is unreachable. "
    "It is rank 0, unless torchrun's agent hosts the store."
)
# So many times the patience may the store be silent. Where names of hosts are looked up in vain,
# TCPStore answers nobody for seconds whenever somebody connects.
_PATIENCES = 3
_numbers = itertools.count()


class Watch:
    """Tells the other ranks when this one fails, and ends this one when another has failed.

    It begins at once, and on every rank as the same of its kind: the third watch of one process
    talks to the third of the others. One daemon thread, with a connection of its own, wakes once a
    `beat_s`: it writes a sign of life into the store, looks for that of the next rank, and for news
    of a failure. A second one wakes once a `patience_s` and looks whether the store still answers
    the first: three times that it may be silent.

    An uncaught exception of the script, Ctrl-C included, is reported before it is printed. A script
    that merely ends has left in good order, and so has one that calls `sys.exit`, since Python
    tells nobody its code; whoever is still waiting for it notices: when all ranks that are there
    wait, and for `patience_s`, the one that has left is reported as failed. `with watch:` is
    stricter: it reports any exception of its body, and a `SystemExit` that has a code.

    `patience_s` must be longer than any single call that holds Python's lock. Time in which this
    process itself did not run (Ctrl-Z) does not count.

    Args:
        store: Any store that all ranks share. Its methods are not called after this.
        rank: That of this process among those that share the store.
        num_ranks: How many they are.
        beat_s: How often this rank gives a sign of life.
        patience_s: For how long another may be silent.
        grace_s: For how long the main thread may take to call `acknowledge`.
        on_failure: Called in a thread of its own, once, when another rank has failed first: it
            makes the main thread leave what it waits in.
        progress: Tells, from any thread, a number that changes with every action, and what
            other rank's doing is waited for, None while it computes or is outside of a step.
        watchdog_s: For how long `progress` may stand still while it waits until stderr tells
            what every rank waits for; None: never. It only tells.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        *,
        beat_s: float = 1.0,
        patience_s: float = 8.0,
        grace_s: float = 3.0,
        on_failure: Callable[[Failure], None],
        progress: Progress | None = None,
        watchdog_s: float | None = None,
    ) -> None:
        self.rank = rank
        self._beat_s, self._patience_s, self._grace_s = beat_s, patience_s, grace_s
        self._stop = threading.Event()
        self._ending = Ending(rank, grace_s, on_failure, self._stop)
        name = f"gpipe/watch/{next(_numbers)}"
        # Two connections: whoever waits on one holds its lock.
        ours, theirs = (_connection(store, name, (_PATIENCES + 1) * patience_s) for _ in range(2))
        self._reports = News(ours, rank, num_ranks)
        self._beats = Beats(ours, rank, num_ranks)
        self._beats.write(Beat(0))
        self._pulse = Pulse(
            Beats(theirs, rank, num_ranks),
            News(theirs, rank, num_ranks),
            Stillness(progress, watchdog_s),
            rank,
            beat_s,
            patience_s,
            store_outlives_rank_0=_outlives_rank_0(store),
        )
        self._last_words = LastWords(self._report_once, self._report_for_main, self._exit)
        self._threads = [
            threading.Thread(target=target, name=f"gpipe-{target.__name__[1:]}", daemon=True)
            for target in (self._watch, self._guard)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def failure(self) -> Failure | None:
        """The first failure of the job, None while there is none."""
        return self._ending.failure

    def report(self, error: BaseException) -> Failure:
        """Tell the others that this rank has failed, and how.

        An error of a connection is most often the echo of another rank's end. Then this waits until
        it is clear which: two beats if all live, about `patience_s` if one is dead.

        Returns:
            The first failure of the job: this one, or that of another rank, which is then printed.
        """
        self._ending.acknowledge()
        first = self.failure or self._first(error)
        self._ending.learn(first)
        self._ending.tell(first)
        return first

    def acknowledge(self) -> None:
        """Tell that the main thread is about to raise; it is not ended any more."""
        self._ending.acknowledge()

    def leave(self) -> None:
        """End in good order; within a beat the others know."""
        self._last_words.restore()
        self._stop.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._report_once(error)
        self.leave()

    def _first(self, error: BaseException) -> Failure:
        own = Failure.of(self.rank, error)
        try:
            if is_of_the_wire(error):
                own = self._cause(own)
            return self.failure or self._reports.post(own)
        except RuntimeError:  # the store is gone; the other thread notices as well, and tells why
            self._ending.known.wait(2 * self._beat_s)
            return self.failure or own

    def _cause(self, echo: Failure) -> Failure:
        """Who is behind a broken connection: one that is silent, one that has left, or nobody."""
        before = self._beats.read_others()
        deadline_s = monotonic() + self._patience_s + 3 * self._beat_s
        while monotonic() < deadline_s and not self._ending.known.wait(self._beat_s):
            now = self._beats.read_others()
            if all(now[rank] != beat or (beat and beat.has_left) for rank, beat in before.items()):
                gone = [rank for rank, beat in now.items() if beat and beat.has_left]
                return left_early(min(gone), echo.error) if gone else echo
        return echo

    def _report_once(self, error: BaseException) -> None:
        if self.failure is None:  # or it is a consequence, as a StageError is
            self.report(error)
        self._ending.acknowledge()

    def _report_for_main(self, error: BaseException) -> None:
        self._ending.end(self.report(error), is_new=True)

    def _watch(self) -> None:
        try:
            while (failure := self._pulse.turn()) is None:
                if self._stop.wait(self._beat_s):
                    break
            else:
                self._ending.react(failure)
            self._pulse.close(2 * self._beat_s)
        except RuntimeError as error:
            if not self._pulse.is_without_store and not self._stop.is_set():
                self._ending.react(_store_is_gone(error))

    def _guard(self) -> None:
        # The first thread cannot notice that the store does not answer: it waits inside of it.
        num_still, num_turns = 0, -1
        while num_still < _PATIENCES:
            if self._stop.wait(self._patience_s) or self._ending.known.is_set():
                return
            num_still = num_still + 1 if num_turns == self._pulse.num_turns else 0
            num_turns = self._pulse.num_turns
        self._ending.react(Failure(None, _STORE_IS_SILENT))

    def _exit(self) -> None:
        self.leave()
        # A thread that comes back out of the store while the interpreter ends would abort it.
        self._threads[0].join(4 * self._beat_s + 1.0)


def _connection(store: Store, name: str, timeout_s: float) -> Store:
    connection = PrefixStore(name, store.clone())  # type: ignore[attr-defined]
    with suppress(RuntimeError):
        connection.set_timeout(timedelta(seconds=timeout_s))
    return connection


def _outlives_rank_0(store: Store) -> bool:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    hosted_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return hosted_by_agent or not isinstance(store, TCPStore)


def _store_is_gone(error: RuntimeError) -> Failure:
    lines = str(error).splitlines() or [""]
    return Failure(
        None,
        "its host is gone: it was killed, or has ended without a word. It is rank 0, unless "
        f"torchrun's agent hosts the store. ({lines[0]})",
    )
