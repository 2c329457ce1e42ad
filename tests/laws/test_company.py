"""A model among others: called from its own parts, from threads, from a fork, and interrupted."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe import GPipe
from gpipe.stage.alias import Aliases
from tests.members import mlp, take_gradients

LIMIT_S = 60  # only a hang comes near


def within_limit(work) -> None:
    """Do the work in a thread, and fail instead of hanging with it."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it hangs"
    for failure in failures:
        raise failure


# The worker of the outer model held the generator's lock, which the inner one's workers asked for.
@pytest.mark.parametrize("place", ["layer", "loss"])
def test_another_model_may_be_called_before_it_has_learnt_anything(place):
    teacher = GPipe(nn.Sequential(*mlp(3), nn.Dropout(0.5)), [2, 2], chunks=2)
    x, y = torch.randn(4, 6), torch.randn(4, 6)

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + teacher(x) if place == "layer" else x

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        guide = teacher(target).detach() if place == "loss" else target
        return (output - guide).square().mean()

    model = GPipe(nn.Sequential(*mlp(3), Asks()), [2, 2], chunks=2)
    within_limit(lambda: [model.step(x, y, loss_fn) for _ in range(3)])


@pytest.mark.parametrize("place", ["loss", "checkpoint"])
def test_a_model_that_is_called_by_itself_says_so(place):
    model = GPipe(mlp(), 2, chunks=2)
    x = torch.randn(4, 6)

    def by_loss() -> None:
        model.step(x, x, lambda output, target: (output - model(target)).sum())

    def by_checkpoint() -> None:
        outer = GPipe(nn.Sequential(nn.Identity()), [1])
        assert outer(x) is not None
        model.step(x, x, lambda output, _: checkpoint(model, output, use_reentrant=True).sum())

    with pytest.raises(RuntimeError, match="called the GPipe that runs it"):
        within_limit(by_loss if place == "loss" else by_checkpoint)


def test_a_thread_that_does_not_start_fails_one_step_only(monkeypatch):
    model = GPipe(mlp(), 3, chunks=2)
    x = torch.randn(4, 6)
    start, num_calls = threading.Thread.start, 0

    def fails_once(thread: threading.Thread) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails_once)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        model(x)
    monkeypatch.undo()
    within_limit(lambda: model(x).sum().backward())


# What a failed backward left in the engine's queue of a worker took the process down at its end.
def test_the_interpreter_exits_in_peace_after_a_failed_backward():
    program = """
import torch
from torch import nn
from gpipe import GPipe

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("mine")

class Layer(nn.Module):
    def forward(self, x):
        return Fails.apply(x) + x.tanh()

model = GPipe(nn.Sequential(nn.Linear(4, 4), Layer(), nn.Linear(4, 4)), [2, 1], chunks=2)
try:
    model(torch.randn(4, 4)).sum().backward()
except KeyError as error:
    print("caught", error)
"""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout.strip()) == (0, "caught 'mine'"), done.stderr


def test_two_models_in_two_threads_do_not_accuse_each_other():
    # One drew, and the other, in which nothing draws, saw the caller's generator move.
    models = [GPipe(nn.Sequential(*mlp(3), nn.Dropout(p)), [2, 2], chunks=2) for p in (0.5, 0.0)]
    x = torch.randn(4, 6)
    for model in models:
        model.step(x, x, nn.MSELoss())

    def train(model: GPipe) -> None:
        for _ in range(60):
            model.step(x, x, nn.MSELoss())

    def both() -> None:
        other = threading.Thread(target=within_limit, args=(lambda: train(models[1]),))
        other.start()
        train(models[0])
        other.join()

    within_limit(both)


def test_a_forked_child_does_not_inherit_a_held_lock():
    program = """
import os, threading, torch
from torch import nn
from gpipe import GPipe

inside, leave = threading.Event(), threading.Event()

class Waits(nn.Module):
    def forward(self, x):
        if threading.current_thread().name.startswith("gpipe") and not inside.is_set():
            inside.set()
            leave.wait(30)
        return x + torch.rand(())

model = GPipe(nn.Sequential(Waits()), [1])
thread = threading.Thread(target=model.eval(), args=(torch.ones(1, 1),))
thread.start()
inside.wait(30)
child = os.fork()
if child == 0:
    GPipe(nn.Sequential(nn.Dropout(0.5)), [1])(torch.ones(1, 1))
    os._exit(7)
leave.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "7"


# Aliases stayed in the modules: what the optimizer had was trained no more, in silence.
@pytest.mark.parametrize("when", ["swap_in", "swap_out", "clear"])
def test_ctrl_c_while_things_are_put_back_leaves_nothing_behind(monkeypatch, when):
    model = GPipe(mlp(), 2, chunks=2)
    mine = list(model.parameters())
    x = torch.randn(4, 6)
    real, num_calls = getattr(Aliases, when), 0

    def interrupted(self: Aliases) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(Aliases, when, interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.step(x, x, nn.MSELoss())
    monkeypatch.undo()
    assert all(a is b for a, b in zip(model.parameters(), mine, strict=True))
    assert all(parameter.grad is None for parameter in mine)

    model.step(x, x, nn.MSELoss())
    gradients = take_gradients(model)
    module = mlp()
    nn.MSELoss()(module(x), x).backward()
    for name, plain in take_gradients(module).items():
        torch.testing.assert_close(gradients[name], plain)
