"""Stages that sleep: how close a schedule comes to its own bound."""

import argparse
from itertools import product
from statistics import mean
from time import perf_counter, sleep
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.costs import StageCosts
from gpipe.schedule import LOOPED_SCHEDULES, SCHEDULE_NAMES, resolve
from gpipe.simulate import simulate

WORKERS = (2, 4, 8)
MICROBATCHES = (1, 4, 32)
STAGES_PER_WORKER = 2  # where a schedule allows several
AIM = 0.98  # of the ideal, at the largest sizes

# Throughput relative to K = 2 and M = 1: Huang et al. 2019, table 2, Transformer-48.
PAPER = {
    (2, 1): 1.0, (2, 4): 1.7, (2, 32): 1.8,
    (4, 1): 1.07, (4, 4): 3.2, (4, 32): 3.4,
    (8, 1): 1.3, (8, 4): 4.8, (8, 32): 6.3,
}  # fmt: skip


class Sleeper(nn.Module):
    """A stage on a device of its own, as far as the CPU can tell: it waits and computes nothing.

    Args:
        forward_s: How long a forward takes.
        backward_s: How long a backward takes.
    """

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.lasted_s: dict[str, list[float]] = {"forward": [], "backward": []}
        self.weight = nn.Parameter(torch.ones(()))

    def forget(self) -> None:
        """Begin to note again."""
        for lengths_s in self.lasted_s.values():
            lengths_s.clear()

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, here and in the backward."""
        self.rest("forward", self.forward_s)
        return _SleepsInBackward.apply(x * self.weight, self)

    def rest(self, action: str, length_s: float) -> None:
        """Sleep, and note how long it really was."""
        start_s = perf_counter()
        sleep(length_s)
        self.lasted_s[action].append(perf_counter() - start_s)


class _SleepsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sleeper: Sleeper) -> Tensor:
        ctx.sleeper = sleeper
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.sleeper.rest("backward", ctx.sleeper.backward_s)
        return gradient, None


class Row(NamedTuple):
    """What was measured in one setting, and what the simulator says of it.

    Attributes:
        makespan_s: From the start of the first action to the end of the last.
        predicted_s: The same, simulated with the mean real lengths of the sleeps.
    """

    num_workers: int
    num_microbatches: int
    schedule: str
    num_stages: int
    makespan_s: float
    predicted_s: float

    @property
    def efficiency(self) -> float:
        """The schedule's own bound over the measured."""
        return self.predicted_s / self.makespan_s

    @property
    def rows_per_s(self) -> float:
        """Micro-batches a second, were the model always one of the same work, cut finer."""
        return self.num_microbatches * self.num_stages / self.makespan_s


def run(num_workers: int, num_microbatches: int, schedule: str, sizes: argparse.Namespace) -> Row:
    """Measure one setting; every stage sleeps as long, so several have more to do than one."""
    share = STAGES_PER_WORKER if schedule in LOOPED_SCHEDULES else 1
    sleepers = [Sleeper(sizes.forward_s, sizes.backward_s) for _ in range(num_workers * share)]
    model = GPipe(
        nn.Sequential(*sleepers),
        [1] * len(sleepers),
        num_microbatches,
        schedule=schedule,
        checkpoint="never",
        devices=["cpu"] * num_workers,
    )
    x = torch.ones(num_microbatches, 1)
    model.step(x, x, nn.MSELoss())  # in the first mini-batch, forwards run one at a time
    for sleeper in sleepers:
        sleeper.forget()
    timeline = model.step(x, x, nn.MSELoss()).timeline
    assert timeline is not None, "in training mode every step has one"
    forward_s, backward_s = (
        mean(length_s for sleeper in sleepers for length_s in sleeper.lasted_s[action])
        for action in ("forward", "backward")
    )
    costs = StageCosts.uniform(len(sleepers), forward_s=forward_s, backward_s=backward_s)
    order = resolve(schedule, len(sleepers), num_microbatches, num_workers)
    predicted_s = simulate(order, costs).makespan_s
    sizes_and_name = num_workers, num_microbatches, schedule
    return Row(*sizes_and_name, len(sleepers), timeline.makespan_s, predicted_s)


def table(rows: list[Row]) -> str:
    """The rows, with throughput relative to two workers and one micro-batch of 1F1B."""
    (first,) = (row for row in rows if row[:3] == (2, 1, "1f1b"))
    lines = ["  K   M  schedule               seconds  simulated  ratio  throughput  the paper's"]
    for row in rows:
        relative = row.rows_per_s / first.rows_per_s
        lines.append(
            f"{row.num_workers:3} {row.num_microbatches:3}  {row.schedule:<20} "
            f"{row.makespan_s:9.3f} {row.predicted_s:10.3f} {row.efficiency:6.3f} {relative:11.2f} "
            f"{PAPER[row.num_workers, row.num_microbatches]:12.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure every setting, largest last, and say whether the aim is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forward-s", type=float, default=0.03, help="length of a forward")
    parser.add_argument("--backward-s", type=float, default=0.06, help="length of a backward")
    sizes = parser.parse_args()
    torch.set_num_threads(1)
    settings = product(WORKERS, MICROBATCHES, SCHEDULE_NAMES)
    rows = [run(*setting, sizes) for setting in settings]
    print(table(rows))
    for row in rows[-len(SCHEDULE_NAMES) :]:
        verdict = "met" if row.efficiency >= AIM else "not met"
        print(f"{row.schedule}: {row.efficiency:.3f}, aim {AIM}: {verdict}")


if __name__ == "__main__":
    main()
