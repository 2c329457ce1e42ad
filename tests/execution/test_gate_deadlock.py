"""The backward of `model(x)` waits for workers that need the device it runs on: no deadlock.

On an accelerator every backward of the process, whoever calls it, runs on ONE thread per device,
and so does the backward of a custom Function whose gradients are on that device. One that waits
there for workers has taken the only thread on which theirs can run: they wait for it and it for
them. With CPU tensors each backward runs in the thread that called it, and nothing is to be seen.

Each test runs this file again as a program, with a device whose backwards share a thread, too. The
work is done once with a plain Function in the place of the gate, which must hang, or the tests
could not fail; and once with the gate.
"""

import copy
import faulthandler
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.testing import assert_close

from gpipe import GPipe
from gpipe.execution import engine, gate
from gpipe.execution.gate import Drain
from gpipe.stage import roots
from gpipe.stage.boundary import Gradients
from gpipe.stage.device import Event
from tests.execution.one_device import DEVICE, register
from tests.members import CHECKPOINT_MODES, SCHEDULES, mlp, train_once

ROOT = Path(__file__).parents[2]
LIMIT_S = 60  # of a child: only one that hangs where nothing watches comes near
FINISHED, HUNG = 0, 3

Join = Callable[[Sequence[Tensor], Sequence[Tensor], Drain], list[Tensor]]


@pytest.mark.parametrize("work", ["workers", "pipeline"])
def test_a_plain_function_that_waits_for_workers_hangs(work: str):
    # The clock starts when the node waits and a worker's backward is submitted: a second is long.
    exit_code, stderr = run_child("plain", [work], limit_s=1)
    assert exit_code == HUNG, stderr


def test_the_gate_waits_for_workers_on_the_callers_thread():
    exit_code, stderr = run_child("gate", ["workers", "pipeline"], limit_s=LIMIT_S / 4)
    assert exit_code == FINISHED, stderr


def run_child(node: str, work: Sequence[str], limit_s: float) -> tuple[int, str]:
    command = [sys.executable, "-W", "error", "-m", "tests.execution.test_gate_deadlock"]
    child = subprocess.run(
        [*command, node, str(limit_s), *work],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=2 * LIMIT_S,
    )
    return child.returncode, child.stderr


# ---- what follows runs in the child ----


class PlainNode(Function):
    """What the gate would be without its token: it waits where its gradients are."""

    @staticmethod
    def forward(ctx: Any, drain: Drain, outputs: Sequence[Tensor], *_: Tensor):
        ctx.drain = drain
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        return None, None, *ctx.drain(list(gradients), [])


def plain_join(outputs: Sequence[Tensor], leaves: Sequence[Tensor], drain: Drain) -> list[Tensor]:
    return list(PlainNode.apply(drain, outputs, *leaves))


class Watch:
    """Sees the two halves of the deadlock: the node waits, and a worker needs the device."""

    def __init__(self, join: Join) -> None:
        self._join = join
        self.device_thread = device_thread()
        self.drain_began = threading.Event()
        self.backward_submitted = threading.Event()
        self.drain_thread: int | None = None

    def join(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], drain: Drain
    ) -> list[Tensor]:
        return self._join(outputs, leaves, partial(self._drain, drain))

    def submitting(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """The function, after a signal that it is about to be called."""

        def submit(*args: Any, **kwargs: Any) -> Any:
            self.backward_submitted.set()
            return backward(*args, **kwargs)

        return submit

    def release(self, _: object) -> None:
        """Nothing more is to be seen: the work has ended, or failed."""
        self.drain_began.set()
        self.backward_submitted.set()

    def _drain(self, drain: Drain, gradients: Gradients, ready: list[Event]) -> Gradients:
        self.drain_thread = threading.get_ident()
        self.drain_began.set()
        return drain(gradients, ready)


class Workers:
    """Threads that each have a graph of their own on the device, and nothing else of a pipeline."""

    def __init__(self, leaves: Sequence[Tensor], watch: Watch) -> None:
        self._inputs = [leaf.detach().requires_grad_() for leaf in leaves]
        self._backward = watch.submitting(torch.autograd.backward)
        with ThreadPoolExecutor(len(leaves)) as workers:
            self.outputs: list[Tensor] = list(workers.map(cube, self._inputs))

    def drain(self, gradients: Gradients, _: list[Event]) -> Gradients:
        """Run all backwards at the same time and wait for them."""
        with ThreadPoolExecutor(len(gradients)) as workers:
            list(workers.map(self._backward, self.outputs, gradients))
        return [tensor.grad for tensor in self._inputs]


def cube(tensor: Tensor) -> Tensor:
    return tensor * tensor * tensor


def run_workers(watch: Watch) -> None:
    plain = [torch.arange(3.0, requires_grad=True), torch.ones(2, requires_grad=True)]
    sum(cube(leaf).sum() for leaf in plain).backward()
    leaves = [on_device(leaf) for leaf in plain]
    workers = Workers(leaves, watch)
    sum(output.sum() for output in watch.join(workers.outputs, leaves, workers.drain)).backward()
    assert_same_gradients(leaves, plain)


def run_pipeline(watch: Watch) -> None:
    submit = watch.submitting(roots._run_backward)
    with (
        mock.patch.object(engine, "join", watch.join),
        mock.patch.object(
            engine, "is_of_autograd", return_value=False
        ),  # what hangs would be refused
        mock.patch.object(roots, "_run_backward", submit),
    ):
        for checkpoint in CHECKPOINT_MODES:
            check_pipeline("backward", checkpoint, "fill_drain")
    for checkpoint, schedule in product(CHECKPOINT_MODES, SCHEDULES):
        check_pipeline("step", checkpoint, schedule)


def check_pipeline(face: str, checkpoint: str, schedule: str) -> None:
    plain = mlp(num_layers=5).double()
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(3, 6).requires_grad_()
    y = torch.zeros(3, 6, dtype=torch.float64)
    model = GPipe(
        copy.deepcopy(plain),
        balance=[3, 2],
        chunks=2,
        checkpoint=checkpoint,
        schedule=schedule,
        devices=[DEVICE, DEVICE],
    )
    loss_fn(plain(x), y).backward()
    leaf = on_device(x)
    train_once(model, face, leaf, y.to(DEVICE), loss_fn)
    assert_same_gradients([leaf, *model.parameters()], [x, *plain.parameters()])


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def on_device(leaf: Tensor) -> Tensor:
    return leaf.detach().to(DEVICE).requires_grad_()


def assert_same_gradients(ours: Sequence[Tensor], plain: Sequence[Tensor]) -> None:
    for tensor, expected in zip(ours, plain, strict=True):
        assert tensor.grad.device == torch.device(DEVICE)
        assert_close(tensor.grad.cpu(), expected.grad)


WORK = {"workers": run_workers, "pipeline": run_pipeline}
NODES: dict[str, Join] = {"plain": plain_join, "gate": gate.join}


def device_thread() -> int:
    """The thread on which autograd runs the backwards of the device."""
    threads = []
    leaf = on_device(torch.ones(1))
    leaf.register_hook(lambda _: threads.append(threading.get_ident()))
    leaf.sum().backward()
    return threads[0]


def main(node: str, limit_s: str, *work: str) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    register()
    with ThreadPoolExecutor(1) as caller:
        caller_thread = caller.submit(threading.get_ident).result()
        for name in work:
            watch = Watch(NODES[node])
            observe(caller.submit(WORK[name], watch), watch, float(limit_s))
            assert watch.drain_thread == caller_thread != watch.device_thread


def observe(done: Future[None], watch: Watch, limit_s: float) -> None:
    """Wait until the work is done; if it hangs, leave the process."""
    done.add_done_callback(watch.release)
    watch.drain_began.wait()
    watch.backward_submitted.wait()
    try:
        done.result(limit_s)
    except TimeoutError:
        faulthandler.dump_traceback()
        # Any other exit would wait for the threads that hang.
        os._exit(HUNG if watch.drain_thread == watch.device_thread else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
