"""The threads of the workers: parallel, persistent, and gone with their owner."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

from gpipe import GPipe
from gpipe.execution.caller import CallerState
from gpipe.execution.channel import Aborted
from gpipe.execution.threaded import ThreadedExecutor
from tests.members import intra_op_threads, mlp

LIMIT_S = 30  # only a hang comes near


def nothing() -> None:
    """An abort that has nobody to wake."""


def run(executor: ThreadedExecutor, *tasks, abort=nothing) -> None:
    executor.run(tasks, CallerState(), abort)


def worker_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("gpipe-worker")}


def test_a_task_may_hand_in_another_one():
    executor, threads = ThreadedExecutor(1), []

    def outer():
        threads.append(threading.current_thread())
        run(executor, lambda: threads.append(threading.current_thread()))

    run(executor, outer)
    assert threads[0] is threads[1] is not threading.current_thread()


def test_what_a_task_has_handed_in_is_stopped_by_an_interruption():
    executor, begun, stopped = ThreadedExecutor(1), threading.Event(), threading.Event()

    def inner():
        begun.set()
        assert stopped.wait(LIMIT_S), "nobody has stopped it"
        raise Aborted

    def interrupt():
        assert begun.wait(LIMIT_S)
        executor.interrupt(KeyboardInterrupt())

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        run(executor, lambda: run(executor, inner, abort=stopped.set))
    interrupting.join()
    assert stopped.is_set()


def test_what_is_handed_in_after_an_interruption_does_not_begin():
    executor, stopped, begun = ThreadedExecutor(1), [], []

    def outer():
        executor._round.fail(KeyboardInterrupt())
        run(executor, lambda: begun.append(bool(stopped)), abort=lambda: stopped.append(True))

    with pytest.raises(KeyboardInterrupt):
        run(executor, outer)
    assert begun == [True], "its channel was closed before its first action"


def test_two_stages_are_in_their_actions_at_the_same_moment():
    # Micro-batch 1 in stage 0 and micro-batch 0 in stage 1 wait for each other: in turn, one of
    # them would wait for ever.
    events = [threading.Event(), threading.Event()]

    class MeetAt(nn.Module):
        """Meets in one micro-batch, told apart by its first value."""

        def __init__(self, microbatch: int, mine: int) -> None:
            super().__init__()
            self.microbatch, self.mine = microbatch, mine

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if int(x.flatten()[0]) == self.microbatch:
                events[self.mine].set()
                assert events[1 - self.mine].wait(LIMIT_S), "the stages do not run in parallel"
            return x

    model = GPipe(nn.Sequential(MeetAt(1, 0), MeetAt(0, 1)), [1, 1], chunks=2).eval()
    model(torch.tensor([[2.0], [2.0]]))  # which layers draw is learnt one layer at a time
    model(torch.tensor([[0.0], [1.0]]))


def test_two_backwards_run_at_the_same_moment():
    events = [threading.Event(), threading.Event()]

    class MeetInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, mine, microbatch):
            ctx.mine = mine if int(x.flatten()[0].detach()) == microbatch else None
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if ctx.mine is not None:
                events[ctx.mine].set()
                assert events[1 - ctx.mine].wait(LIMIT_S), "the backwards do not run in parallel"
            return gradient, None, None

    class Layer(nn.Module):
        def __init__(self, mine: int, microbatch: int) -> None:
            super().__init__()
            self.mine, self.microbatch = mine, microbatch

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return MeetInBackward.apply(x, self.mine, self.microbatch)

    # Fill-drain goes back from the last micro-batch: stage 0 is at 1 when stage 1 is at 0.
    model = GPipe(nn.Sequential(Layer(0, 1), Layer(1, 0)), [1, 1], chunks=2)
    x = torch.tensor([[0.0], [1.0]], requires_grad=True)
    model(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 1))


def test_cores_are_divided_between_the_workers():
    seen = []

    class Look(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return x

    with intra_op_threads(4):
        GPipe(nn.Sequential(Look(), Look()), [1, 1]).eval()(torch.ones(1, 1))
        assert torch.get_num_threads() == 4
    assert seen == [2, 2]


def test_the_first_failure_reaches_the_caller_and_the_others_are_woken():
    closed = threading.Event()

    def wait_until_aborted() -> None:
        assert closed.wait(LIMIT_S)
        raise Aborted

    def fail() -> None:
        raise KeyError("mine")

    executor = ThreadedExecutor(2)
    with pytest.raises(KeyError, match="mine"):
        run(executor, wait_until_aborted, fail, abort=closed.set)
    run(executor, nothing, nothing)


def test_ctrl_c_waits_for_the_running_actions_and_then_arrives():
    # It hits the caller, who waits, while both workers are at work. Were it raised at once, state
    # would be put back under the hands of workers that still change it.
    program = """
import os, signal, threading
from gpipe.execution.caller import CallerState
from gpipe.execution.threaded import ThreadedExecutor

aborted, ended = threading.Event(), []

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    aborted.wait(30)
    ended.append(0)

def work():
    aborted.wait(30)
    ended.append(1)

executor = ThreadedExecutor(2)
try:
    executor.run([interrupt, work], CallerState(), aborted.set)
except KeyboardInterrupt:
    print(sorted(ended))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[0, 1]"


def test_threads_persist_and_end_with_their_owner():
    before = worker_threads()
    model = GPipe(mlp(), 3, chunks=4)
    assert worker_threads() == before, "threads start with the first mini-batch"
    model(torch.ones(4, 6)).sum().backward()
    mine = worker_threads() - before
    assert len(mine) == 3
    model(torch.ones(4, 6)).sum().backward()
    assert worker_threads() - before == mine

    watch = weakref.ref(model)
    del model
    gc.collect()
    assert watch() is None
    assert not worker_threads() & mine


def test_the_interpreter_exits_with_a_model_at_module_level():
    program = """
import torch
from torch import nn
from gpipe import GPipe
model = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
model(torch.ones(2, 2)).sum().backward()
print("done")
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "done"
    assert result.stderr == ""


def test_a_forked_child_gets_threads_of_its_own():
    program = """
import os, torch
from torch import nn
from gpipe import GPipe
model = GPipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=2).eval()
model(torch.ones(2, 2))
child = os.fork()
if child == 0:
    model(torch.ones(2, 2))
    os._exit(7)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert result.stdout.strip() == "7"
