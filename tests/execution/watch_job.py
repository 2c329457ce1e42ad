"""Starts the ranks of many small jobs at once, and tells how each has ended.

A program of its own, since what is tested are the ends of real interpreters: it imports torch once
and forks every rank, whose end is then that of this script.

    python -m tests.execution.watch_job FOLDER NUMBER_AT_ONCE JOB...
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from gpipe.execution.watch import Watch

QUICK = {"beat_s": 0.25, "patience_s": 3.0, "grace_s": 1.0}
NUM_RANKS = 3
PROMISED: dict[str, float] = {}  # what Watch has by default


class Rank:
    """One rank of a job: its main thread, which waits in steps as that of a pipeline does."""

    def __init__(self, folder, rank, kind, settings, **others):
        self.folder, self.rank = folder, rank
        self.store = store_of(folder, kind, rank)
        self.waits_for = None
        self.num_done = 0
        self.left_wait = threading.Event()
        self.watch = Watch(
            self.store,
            rank,
            NUM_RANKS,
            **settings,
            on_failure=lambda failure: self.left_wait.set(),
            progress=lambda: (self.num_done, self.waits_for),
            **others,
        )
        self.meet(NUM_RANKS, "begin")

    def meet(self, num_ranks, name):
        if self.store.add(name, 1) == num_ranks:
            self.store.set(f"{name}: all", "")
        self.store.wait([f"{name}: all"], timedelta(seconds=60))

    def mark(self):
        """The moment of what goes wrong."""
        (self.folder / "mark").write_text(str(time.monotonic()))

    def step(self, waits_for="a1.0", timeout_s=60):
        """Wait for a rank that does not answer, as the main thread of a pipeline does."""
        self.waits_for = waits_for
        if self.left_wait.wait(timeout_s):
            self.watch.acknowledge()
            raise self.watch.failure.as_error()
        self.waits_for = None


def store_of(folder, kind, rank):
    """Of a file, hosted by rank 0, or hosted by the parent, as by torchrun's agent."""
    if kind == "file":
        return dist.FileStore(str(folder / "store"), NUM_RANKS)
    port = folder / "port"
    if kind == "rank_0" and rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port.with_suffix(".part").write_text(str(store.port))
        port.with_suffix(".part").rename(port)
        return store
    if kind == "parent":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    while not port.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), None, False, wait_for_workers=False)


def kill_oneself():
    os.kill(os.getpid(), signal.SIGKILL)


def stop_oneself():
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_in_main():
    raise ValueError("no data")


def exit_3():
    sys.exit(3)


def interrupt_oneself():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


def raise_in_worker():
    """As the executor of a pipeline does it, whose worker thread passes its exception on."""
    error = ValueError("no weights")
    error.add_note("gpipe: in stage 1, layer 3 ('3', Linear), micro-batch 5, forward")
    thread = threading.Thread(target=lambda: CURRENT[0].watch.report(error))
    thread.start()
    thread.join()
    raise error


CURRENT = []


def goes_wrong(folder, rank, culprit, how, kind="rank_0", settings=QUICK):
    """One rank does something; the others wait for it."""
    me = Rank(folder, rank, kind, settings)
    CURRENT.append(me)
    if rank == culprit:
        me.mark()
        globals()[how]()
    else:
        me.step()


def promised(folder, rank, culprit, how, kind="rank_0"):
    goes_wrong(folder, rank, culprit, how, kind, PROMISED)


def stuck(folder, rank, kind="rank_0", settings=QUICK):
    """Rank 1 raises while rank 2 loads data, rank 0 is in a step."""
    me = Rank(folder, rank, kind, settings)
    if rank == 1:
        me.mark()
        raise_in_main()
    if rank == 2:
        sys.stdout.write("unflushed\n")
        time.sleep(60)
    me.step()


def body_of_with(folder, rank):
    me = Rank(folder, rank, "rank_0", QUICK)
    with me.watch:
        if rank == 1:
            me.mark()
            sys.exit(3)
        me.step()


def good_order(folder, rank, kind):
    """All end at their own time; rank 0, which may host the store, first."""
    me = Rank(folder, rank, kind, QUICK)
    if rank == 2:
        time.sleep(5)
        before = sys.excepthook
        me.watch.leave()
        assert sys.excepthook is not before


def stall(folder, rank):
    """Twice nothing moves; then all is well."""
    me = Rank(folder, rank, "rank_0", QUICK | {"patience_s": 9.0}, watchdog_s=1.0)
    if rank == 2:
        me.meet(3, "end")
        return
    for what in "ab":
        me.meet(2, what)
        # The one that speaks for all goes on last, or the other would tell the same again.
        me.step(f"rank {rank} waits for {what}", 3.5 if rank == 0 else 2.5)
        me.num_done += 1
    me.meet(3, "end")


def over_gloo(folder, rank, culprit, how):
    """The others hear of it from broken connections."""
    me = Rank(folder, rank, "parent", QUICK)
    CURRENT.append(me)
    group = dist.PrefixStore("group", me.store)
    dist.init_process_group(
        "gloo", store=group, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=30)
    )
    dist.barrier()
    if rank == culprit:
        me.mark()
        globals()[how]()
    me.waits_for = "a message"
    try:
        dist.recv(torch.empty(1), src=culprit)
    except RuntimeError as error:
        raise me.watch.report(error).as_error() from error


def all_are_held(folder, rank):
    """A process that was stopped for a while, all ranks alike, as by Ctrl-Z, goes on."""
    Rank(folder, rank, "parent", QUICK)
    os.kill(os.getpid(), signal.SIGSTOP)  # the parent lets it go on


def fork(folder, name, rank):
    """The process of a rank: its output goes into files."""
    process_id = os.fork()
    if process_id:
        return process_id
    for number, stream in (1, "out"), (2, "err"):
        os.dup2(os.open(folder / f"{rank}.{stream}", os.O_WRONLY | os.O_CREAT), number)
    function, *args = name.split()
    typed = [int(each) if each.isdigit() else each for each in args]
    globals()[function](folder, rank, *typed)
    return None


def main():
    torch.set_num_threads(1)
    gc.freeze()  # so that the ranks share what they were born with
    root, num_at_once, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    host, ports = host_in_a_child(sum(needs_a_host(name) for name in names))
    running, stopped = {}, {}
    for number, name in enumerate(names):
        folder = root / str(number)
        folder.mkdir()
        if needs_a_host(name):
            (folder / "port").write_text(str(ports.pop()))
        for rank in range(NUM_RANKS):
            process_id = fork(folder, name, rank)
            if process_id is None:
                return  # the script of the rank is over, and its interpreter ends
            running[process_id] = folder, rank
        wait_for_ends(running, stopped, (num_at_once - 1) * NUM_RANKS)
    wait_for_ends(running, stopped, 0)
    os.kill(host, signal.SIGTERM)


def needs_a_host(name):
    return any(word in name for word in ("parent", "over_gloo", "held"))


def host_in_a_child(number):
    """Stores in another process, whose threads are no good in one that forks; and their ports."""
    reader, writer = os.pipe()
    host = os.fork()
    if host == 0:
        stores = [
            dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for _ in range(number)
        ]
        os.write(writer, json.dumps([store.port for store in stores]).encode())
        while True:
            time.sleep(100)
    return host, json.loads(os.read(reader, 10_000))


def wait_for_ends(running, stopped, num_left):
    """Until no more than so many live; those that take too long are killed."""
    deadline_s = time.monotonic() + 60
    while len(running) > num_left:
        process_id, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if process_id == 0:
            let_go_on(stopped, running)
            time.sleep(0.01)
            for late in list(running) if time.monotonic() > deadline_s else ():
                os.kill(late, signal.SIGKILL)
        elif os.WIFSTOPPED(status):
            stopped[process_id] = time.monotonic()
        elif process_id in running:
            folder, rank = running.pop(process_id)
            stopped.pop(process_id, None)
            end = {"code": os.waitstatus_to_exitcode(status), "end_s": time.monotonic()}
            (folder / f"{rank}.end").write_text(json.dumps(end))


def let_go_on(stopped, running):
    """Those that have stopped long enough; one that was meant to fail by it is killed at last."""
    for process_id, moment_s in list(stopped.items()):
        folder = running[process_id][0]
        mates = [other for other, (its_folder, _) in running.items() if its_folder == folder]
        if not (folder / "mark").exists() and time.monotonic() > moment_s + 5:
            os.kill(process_id, signal.SIGCONT)
            del stopped[process_id]
        elif (folder / "mark").exists() and len(mates) == 1:
            os.kill(process_id, signal.SIGKILL)
            del stopped[process_id]


if __name__ == "__main__":
    main()
