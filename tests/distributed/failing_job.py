"""Starts the ranks of many small trainings at once, and tells how each rank has ended.

A program of its own, since what is tested are the ends of real interpreters: it imports torch once
and forks every rank, whose end is then that of this script.

    python -m tests.distributed.failing_job FOLDER NUMBER_AT_ONCE JOB...

A job is named by what happens, on which rank, and who hosts the store: "forward 1 parent".
"""

import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gpipe import GPipe, clip_grad_norm_, is_recomputing
from gpipe.errors import ConfigError, StageError
from tests.execution.watch_job import (
    NUM_RANKS,
    host_in_a_child,
    kill_oneself,
    store_of,
    wait_for_ends,
)

__all__ = ["DIFFERENCES"]

LAST_STEP = 2
ROWS, WIDTH = 8, 4
CHUNKS = 4
MICROBATCH = 2  # with which it goes wrong
NAP_S = 4.0


class Plan:
    """What goes wrong in this process; nothing, if another one is to fail."""

    def __init__(self) -> None:
        self.how = ""
        self.folder = Path()
        self.step = 0
        self._calls: Counter[tuple[int, str]] = Counter()

    def mark(self) -> None:
        """The moment of what goes wrong."""
        (self.folder / "mark").write_text(str(time.monotonic()))

    def reach(self, point: str, act: Callable[[], object], after: int = 0) -> None:
        """Act, if it goes wrong at this point, in the last step, after so many calls there."""
        number = self._calls[self.step, point]
        self._calls[self.step, point] += 1
        if self.step == LAST_STEP and number == after and self.how == point:
            self.mark()
            act()

    def is_now(self, how: str) -> bool:
        """Whether the data of this step are to be wrong; then that is the moment."""
        if self.step != LAST_STEP or self.how != how:
            return False
        self.mark()
        return True


PLAN = Plan()


def raising(text: str) -> Callable[[], None]:
    def act() -> None:
        raise ValueError(text)

    return act


def exit_hard() -> None:
    os._exit(7)


def interrupt_oneself() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


def nap() -> None:
    time.sleep(NAP_S)


class Fails(torch.autograd.Function):
    """The identity, with a backward that may fail."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        PLAN.reach("backward", raising("bad backward"), MICROBATCH)
        return gradient


class Faulty(nn.Linear):
    """May fail in whatever it does."""

    def forward(self, x: Tensor) -> Tensor:
        if is_recomputing():
            PLAN.reach("recompute", raising("bad recompute"), MICROBATCH)
            return Fails.apply(super().forward(x))
        for point, act in IN_FORWARD.items():
            PLAN.reach(point, act, MICROBATCH)
        return Fails.apply(super().forward(x))


IN_FORWARD = {
    "forward": raising("bad forward"),
    "exit_7": exit_hard,
    "kill": kill_oneself,
    "nap": nap,
}


def loss(output: Tensor, target: Tensor) -> Tensor:
    PLAN.reach("loss", raising("bad loss"), MICROBATCH)
    return (output - target).square().mean()


def data(rank: int) -> tuple[Tensor, Tensor]:
    """The rows of a step, as this rank has them."""
    PLAN.reach("data", raising("no data"))
    PLAN.reach("interrupt", interrupt_oneself)
    columns = WIDTH + 1 if PLAN.is_now("columns") else WIDTH
    num_inputs = 0 if PLAN.is_now("no_rows") else ROWS
    num_targets = ROWS - 1 if PLAN.is_now("other_rows") else ROWS
    return torch.ones(num_inputs, columns), torch.ones(num_targets, WIDTH)


def layers(num_layers: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*((nn.Linear, Faulty)[i % 2](WIDTH, WIDTH) for i in range(num_layers)))


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("pipe",))


def train(rank: int, **options: Any) -> None:
    arguments = {"checkpoint": "always", "mesh": mesh()} | options
    PLAN.step = LAST_STEP if PLAN.how == "balance" else 0
    balance = [2, 2, 1] if PLAN.is_now("balance") else [2, 2, 2]
    model = GPipe(layers(), balance, CHUNKS, **arguments)
    for PLAN.step in range(LAST_STEP + 1):
        x, y = data(rank)
        model.step(x, y, loss)
        PLAN.reach("clip", raising("bad clip"))
        clip_grad_norm_(model, 1.0)
        model.zero_grad()


DIFFERENCES: dict[str, tuple[Any, Any]] = {
    "the number of layers": ({"num_layers": 6}, {"num_layers": 8}),
    "balance": ({"balance": [2, 2, 2]}, {"balance": [1, 3, 2]}),
    "chunks": ({"chunks": 4}, {"chunks": 5}),
    "schedule": ({"schedule": "1f1b"}, {"schedule": "fill_drain"}),
    "checkpoint": ({"checkpoint": "never"}, {"checkpoint": "always"}),
    "split": ({"split": 0}, {"split": 1}),
    "seed": ({"seed": 1}, {"seed": 2}),
    "all_reduce": ({"all_reduce": "ring"}, {"all_reduce": "none"}),
    "bucket_bytes": ({"bucket_bytes": 1}, {"bucket_bytes": 2}),
}
"""What may differ between the ranks: the options of the others, and of the last."""


def insist() -> None:
    """Train, and try again what has failed."""
    model = GPipe(layers(), [2, 2, 2], CHUNKS, checkpoint="always", mesh=mesh())
    PLAN.step, said = LAST_STEP, []
    x = torch.ones(ROWS, WIDTH)
    for _ in range(2):
        try:
            model.step(x, x, loss)
        except (ValueError, StageError) as error:
            said.append(f"{type(error).__name__}: {error}")
    sys.stdout.write(json.dumps(said))


def differ(rank: int) -> None:
    """Make one GPipe after the other that is not the same on all ranks; then one that is."""
    meshes, told = mesh(), {}
    for fact, (usual, other) in DIFFERENCES.items():
        options = {"balance": 3, "chunks": 4} | (other if rank == NUM_RANKS - 1 else usual)
        try:
            GPipe(layers(options.pop("num_layers", 6)), mesh=meshes, **options)
        except ConfigError as error:
            told[fact] = str(error)
    train(rank, mesh=meshes)
    sys.stdout.write(json.dumps(told))


def run(folder: Path, rank: int, how: str, culprit: str, store: str) -> None:
    """The script of a rank."""
    if rank == int(culprit):
        PLAN.how, PLAN.folder = "forward" if how == "insist" else how, folder
    made = store_of(folder, store, rank)
    dist.init_process_group("gloo", store=made, rank=rank, world_size=NUM_RANKS)
    if how == "differ":
        differ(rank)
    elif how == "insist":
        insist()
    elif how == "nap":
        train(rank, watchdog_s=1.5)
    else:
        train(rank)


def fork(folder: Path, name: str, rank: int) -> int:
    """The process of a rank: its output goes into files. 0 in the rank itself, when it is done."""
    process_id = os.fork()
    if process_id:
        return process_id
    for number, stream in (1, "out"), (2, "err"):
        os.dup2(os.open(folder / f"{rank}.{stream}", os.O_WRONLY | os.O_CREAT), number)
    run(folder, rank, *name.split())
    return 0


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # so that the ranks share what they were born with
    root, num_at_once, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    host, ports = host_in_a_child(sum("parent" in name for name in names))
    running: dict[int, tuple[Path, int]] = {}
    for number, name in enumerate(names):
        folder = root / str(number)
        folder.mkdir()
        if "parent" in name:
            (folder / "port").write_text(str(ports.pop()))
        for rank in range(NUM_RANKS):
            process_id = fork(folder, name, rank)
            if process_id == 0:
                return  # the script of the rank is over, and its interpreter ends
            running[process_id] = folder, rank
        wait_for_ends(running, {}, (num_at_once - 1) * NUM_RANKS)
    wait_for_ends(running, {}, 0)
    os.kill(host, signal.SIGTERM)


if __name__ == "__main__":
    main()
