"""One stage a process: our time against torch.distributed.pipelining's."""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.sleep import Sleeper
from gpipe import GPipe
from tests.distributed.launch import run

WORKERS = (2, 4, 8)
SCHEDULES = {"fill_drain": ScheduleGPipe, "1f1b": Schedule1F1B}
NUM_MICROBATCHES = 32
ROWS = 4  # of a micro-batch
WIDTH = 4
NUM_WARM_UP = 5  # mini-batches; the first two of a GPipe look closely
OURS, THEIRS = "ours", "theirs"

Moments = tuple[float, float]
"""When a mini-batch began and ended in one rank; the clock is that of the machine."""


class Sizes(NamedTuple):
    """How much is measured, how long stages sleep forward and backward, if they do, and where."""

    num_microbatches: int
    num_rounds: int
    sleep_s: tuple[float, float] | None = None
    binds: bool = True


class Contender(NamedTuple):
    """One way to train: the module that gets the gradients of this rank, and a mini-batch."""

    module: nn.Module
    train: Callable[[], object]


def measure(rank: int, sizes: Sizes) -> dict[tuple[str, str], list[Moments]]:
    """In each rank: the moments of each round by schedule and contender, who take turns."""
    if sizes.binds:
        bind(rank)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pipe",))
    found: dict[tuple[str, str], list[Moments]] = {}
    for schedule in SCHEDULES:
        both = contenders(rank, schedule, sizes, mesh)
        for contender in both.values():
            warm_up(contender)
        require_same_gradients(both)
        for _, (name, contender) in product(range(sizes.num_rounds), both.items()):
            found.setdefault((schedule, name), []).append(moments(contender))
        close(both[OURS].module)
    return found


def bind(rank: int) -> None:
    """Keep all threads of this process on a core of its own, if there are enough.

    Left to itself the system now and then has two ranks on one core for a whole mini-batch, while
    another is idle: what sleeps then wakes up to a millisecond late.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < dist.get_world_size():
        return
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cores[rank]})


def close(model: nn.Module) -> None:
    """Give its groups back: with all of them, processes take too long to end."""
    assert isinstance(model, GPipe)
    assert model._layout.pipe is not None
    dist.barrier()
    model._layout.pipe.close()


def contenders(rank: int, schedule: str, sizes: Sizes, mesh: DeviceMesh) -> dict[str, Contender]:
    """Both, each with a model of its own and the same numbers in it."""
    num_ranks, num_microbatches = mesh.size(), sizes.num_microbatches
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, num_microbatches * ROWS, WIDTH, generator=generator)
    loss_fn = nn.MSELoss()

    model = GPipe(
        nn.Sequential(*stages(num_ranks, sizes)),
        [1] * num_ranks,
        num_microbatches,
        schedule=schedule,
        checkpoint="never",  # the others do not recompute
        mesh=mesh,
    )
    own = stages(num_ranks, sizes)[rank]
    stage = PipelineStage(own, rank, num_ranks, torch.device("cpu"))
    theirs = SCHEDULES[schedule](stage, num_microbatches, loss_fn)
    args = (x,) if rank == 0 else ()
    targets = {"target": y} if rank == num_ranks - 1 else {}
    return {
        OURS: Contender(model, lambda: model.step(x, y, loss_fn)),
        THEIRS: Contender(own, lambda: theirs.step(*args, **targets, losses=[])),
    }


def stages(num_stages: int, sizes: Sizes) -> list[nn.Module]:
    """All stages of the model, with the same values in each call."""
    torch.manual_seed(0)
    if sizes.sleep_s is None:
        return [nn.Linear(WIDTH, WIDTH) for _ in range(num_stages)]
    return [Sleeper(*sizes.sleep_s) for _ in range(num_stages)]


def warm_up(contender: Contender) -> None:
    """Train a few times; who sleeps does not sleep yet."""
    sleepers = [each for each in contender.module.modules() if isinstance(each, Sleeper)]
    lengths_s = [(each.forward_s, each.backward_s) for each in sleepers]
    for each in sleepers:
        each.forward_s = each.backward_s = 0.0
    for _ in range(NUM_WARM_UP):
        moments(contender)
    for each, length_s in zip(sleepers, lengths_s, strict=True):
        each.forward_s, each.backward_s = length_s


def moments(contender: Contender) -> Moments:
    """When one mini-batch, forward and backward, began and ended; all ranks start together."""
    contender.module.zero_grad()
    dist.barrier()
    start_s = perf_counter()
    contender.train()
    return start_s, perf_counter()


def require_same_gradients(both: dict[str, Contender]) -> None:
    """They must have done the same."""
    ours, theirs = (list(contender.module.parameters()) for contender in both.values())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def medians_s(num_ranks: int, sizes: Sizes) -> dict[tuple[str, str], float]:
    """How long a mini-batch takes, from the first rank's start to the last one's end."""
    ranks = run(measure, num_ranks, sizes, timeout_s=900)
    return {
        key: median(map(length_s, zip(*(each[key] for each in ranks), strict=True)))
        for key in ranks[0]
    }


def length_s(ranks: Sequence[Moments]) -> float:
    """That of one mini-batch."""
    return max(end_s for _, end_s in ranks) - min(start_s for start_s, _ in ranks)


def lines(sizes: Sizes) -> Iterator[str]:
    """The rows of a table."""
    for num_ranks in WORKERS:
        times_s = medians_s(num_ranks, sizes)
        ideal_s = (sizes.num_microbatches + num_ranks - 1) * sum(sizes.sleep_s or ())
        for schedule in SCHEDULES:
            ours_s, theirs_s = (times_s[schedule, name] for name in (OURS, THEIRS))
            cells = [f"{num_ranks:>3}", f"{schedule:<10}"]
            if ideal_s:
                cells += [f"{ideal_s / ours_s:.4f}", f"{ideal_s / theirs_s:.4f}"]
            ratio = theirs_s / ours_s if ideal_s else ours_s / theirs_s
            is_ahead = "ahead" if ours_s < theirs_s else "not ahead"
            yield "  ".join([*cells, f"{ratio:.4f}", is_ahead])


def show(title: str, head: str, sizes: Sizes) -> None:
    """Measure and print a table, if there is to be one."""
    if sizes.num_rounds:
        print(f"{title}\n  K  schedule    {head}", flush=True)
        for line in lines(sizes):
            print(line, flush=True)
        print()


def main() -> None:
    """Measure every number of processes and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="mini-batches of tiny stages (60)")
    parser.add_argument("--sleeping-rounds", type=int, default=3, help="of those that sleep (3)")
    parser.add_argument("--forward-s", type=float, default=0.03, help="length of a forward")
    parser.add_argument("--backward-s", type=float, default=0.06, help="length of a backward")
    parser.add_argument(
        "--bind",
        action=argparse.BooleanOptionalAction,
        default=hasattr(os, "sched_setaffinity"),
        help="give each process a core of its own if there are enough",
    )
    given = parser.parse_args()
    print(
        f"GPipe(mesh=...).step against torch.distributed.pipelining, gloo, K processes with one "
        f"thread each, M = {NUM_MICROBATCHES};\nmedians of rounds in which both take turns"
        f"{', bound to a core each if there are enough' if given.bind else ''}. The aim: ours is "
        "ahead for fill-drain and 1F1B at K = 2, 4 and 8.\n"
    )
    show(
        f"Stages of one Linear({WIDTH}, {WIDTH}): time per micro-batch, ours / theirs",
        "ratio",
        Sizes(NUM_MICROBATCHES, given.rounds, binds=given.bind),
    )
    show(
        "Stages that sleep: efficiency, which is (M + K - 1)(t_F + t_B) / measured",
        "ours    theirs  ours / theirs",
        Sizes(
            NUM_MICROBATCHES,
            given.sleeping_rounds,
            (given.forward_s, given.backward_s),
            given.bind,
        ),
    )


if __name__ == "__main__":
    main()
