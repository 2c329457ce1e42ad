"""A persistent thread per worker, in one process."""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from gpipe.execution.caller import CallerState
from gpipe.execution.channel import Aborted

__all__ = ["ThreadedExecutor", "is_of_autograd"]

Task = Callable[[], None]


class _Round:
    """One task for every worker, and the first failure among them."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._lock = threading.Lock()
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Keep the first failure, and stop the others at their next action."""
        with self._lock:
            if self.failure is None and not isinstance(error, Aborted):
                self.failure = error
            abort = self._abort
        abort()

    @contextmanager
    def stopped_by(self, abort: Callable[[], None]) -> Iterator[None]:
        """Let a failure stop what is done meanwhile, too."""
        before = self._abort
        with self._lock:
            self._abort = abort
        if self.failure is not None:
            abort()
        try:
            yield
        finally:
            self._abort = before


class _Job:
    """A task on its way through one worker."""

    def __init__(self, task: Task, num_threads: int, round_: _Round) -> None:
        self._task: Task | None = task
        self._num_threads = num_threads
        self._round = round_
        self.finished = threading.Event()

    def run(self) -> None:
        """Do the task once, even if an interrupted caller has handed it in twice."""
        task, self._task = self._task, None
        if task is None:
            return
        try:
            _divide_cores(self._num_threads)
            task()
        except BaseException as error:  # noqa: BLE001 - it is raised again, in the caller
            self._round.fail(error)
        finally:
            del task
            self.finished.set()


class ThreadedExecutor:
    """Runs one task per worker, each in a thread of its own that lives as long as this does.

    The threads start with the first round. In a forked child, where they do not exist, new ones
    start.

    Args:
        num_workers: How many threads.
        gives_up_after_s: How long an interrupted caller waits for them; None: until they are done.
    """

    def __init__(self, num_workers: int, gives_up_after_s: float | None = None) -> None:
        self._num_workers = num_workers
        self._gives_up_after_s = gives_up_after_s
        self._queues: list[SimpleQueue[_Job | None]] = []
        self._threads: list[threading.Thread] = []
        self._process_id: int | None = None
        self._lock = threading.Lock()
        self._round: _Round | None = None
        self._jobs: list[_Job] = []
        self._lost_to: BaseException | None = None
        self._end: weakref.finalize[..., ThreadedExecutor] | None = None

    def run(self, tasks: Sequence[Task], caller: CallerState, abort: Callable[[], None]) -> None:
        """Run the tasks at the same time and wait until all of them have ended.

        A task may itself hand in one for its worker, which then runs at once.

        Args:
            tasks: One for each worker.
            caller: The state under which they run.
            abort: Called when a task has failed or the caller was interrupted, so that others which
                wait for it stop.

        Raises:
            BaseException: The first failure of any task, or the caller's own interruption.
        """
        assert len(tasks) == self._num_workers
        if self.owns_this_thread():
            self._run_here(tasks, abort)
            return
        round_ = _Round(abort)
        num_threads = max(1, torch.get_num_threads() // self._num_workers)
        jobs = [_Job(_under(caller, task), num_threads, round_) for task in tasks]
        self._start()
        with self._lock:
            if self._lost_to is not None:
                raise self._lost_to
            self._round, self._jobs = round_, jobs
        self._complete(jobs, round_)
        with self._lock:
            self._round, self._jobs = None, []
        if round_.failure is not None:
            try:
                raise round_.failure
            finally:
                round_.failure = None

    def _run_here(self, tasks: Sequence[Task], abort: Callable[[], None]) -> None:
        (task,) = tasks
        assert self._round is not None
        with self._round.stopped_by(abort):
            task()

    def interrupt(self, error: BaseException) -> None:
        """Let `run`, wherever it waits, raise this error, and give the workers up.

        For when a worker waits for another process that will never answer; from any thread. No
        task is run any more.
        """
        with self._lock:
            self._lost_to = error
            round_, jobs = self._round, self._jobs
            if self._end is not None:
                self._end.detach()  # nobody waits for the threads when the interpreter ends
        if round_ is not None:
            round_.fail(error)
        for job in jobs:
            job.finished.set()

    @property
    def has_lost_worker(self) -> bool:
        """Whether a worker that was given up has not come back."""
        return self._lost_to is not None and any(each.is_alive() for each in self._threads)

    def owns_this_thread(self) -> bool:
        """Whether the caller is one of the workers."""
        return threading.current_thread() in self._threads

    def _complete(self, jobs: list[_Job], round_: _Round) -> None:
        # Ctrl-C may arrive at any moment. The workers still run then, so it is only noted here.
        num_submitted = 0
        while True:
            try:
                for worker in range(num_submitted, len(jobs)):
                    self._queues[worker].put(jobs[worker])
                    num_submitted += 1
                for job in jobs:
                    job.finished.wait()
            except KeyboardInterrupt as error:
                round_.fail(error)
                if self._gives_up_after_s is not None:
                    self._give_up_later(jobs, error, self._gives_up_after_s)
            else:
                return

    def _give_up_later(self, jobs: list[_Job], error: BaseException, after_s: float) -> None:
        """What waits for another process may never come back."""

        def give_up() -> None:
            if not all(job.finished.wait(after_s) for job in jobs):
                self.interrupt(error)

        threading.Thread(target=give_up, name="gpipe-interrupt", daemon=True).start()

    def _start(self) -> None:
        if self._process_id == os.getpid():
            return
        queues: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in range(self._num_workers)]
        threads: list[threading.Thread] = []
        try:
            for worker, queue in enumerate(queues):
                name = f"gpipe-worker-{worker}"
                thread = threading.Thread(target=_work, args=(queue,), name=name, daemon=True)
                thread.start()
                threads.append(thread)
        except BaseException:
            _stop(queues, threads, os.getpid())
            raise
        self._queues, self._threads, self._process_id = queues, threads, os.getpid()
        # Runs when this object goes, and before the interpreter exits.
        self._end = weakref.finalize(self, _stop, queues, threads, self._process_id)


def is_of_autograd() -> bool:
    """Whether the caller is a thread of autograd, which runs the backwards of an accelerator."""
    # Python did not start it, and it has a backward to run.
    is_foreign = isinstance(threading.current_thread(), threading._DummyThread)
    return is_foreign and torch._C._current_graph_task_id() != -1


def _under(caller: CallerState, task: Task) -> Task:
    return lambda: caller.run(task)


def _work(queue: SimpleQueue[_Job | None]) -> None:
    while (job := queue.get()) is not None:
        job.run()
        del job  # what the task held must not live until the next one comes


def _stop(
    queues: list[SimpleQueue[_Job | None]], threads: list[threading.Thread], process_id: int
) -> None:
    if process_id != os.getpid():
        return
    for queue in queues:
        queue.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def _divide_cores(num_threads: int) -> None:
    # A new thread starts with all cores; torch keeps this number per thread.
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
