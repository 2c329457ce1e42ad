"""What big schedules cost: seconds and memory to build, check and simulate one."""

import argparse
import resource
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple, TypeVar

from gpipe.costs import StageCosts
from gpipe.schedule import Schedule, add_recompute, add_transfers, check, one_f_one_b
from gpipe.simulate import simulate

T = TypeVar("T")

STEPS = ("build", "add transfers", "check", "simulate")


class Setting(NamedTuple):
    """A size, and what is aimed at: seconds and gigabytes, none where there is no aim."""

    num_stages: int
    num_microbatches: int
    aim_s: float | None = None
    aim_gb: float | None = None


SETTINGS = (
    Setting(64, 128),
    Setting(64, 256),
    Setting(64, 512, 1.5),
    Setting(64, 1024),
    Setting(128, 2048, 15.0, 2.0),
)


class Measured(NamedTuple):
    """Seconds per step, and the number of actions: those that compute, and all."""

    steps_s: list[float]
    num_computing: int
    num_actions: int


def measure(setting: Setting) -> Measured:
    """Takes 1F1B with recompute once through all steps."""
    steps_s: list[float] = []
    bare = timed(lambda: build(setting), steps_s)
    schedule = timed(lambda: add_transfers(bare), steps_s)
    timed(lambda: check(schedule), steps_s)
    costs = StageCosts.uniform(setting.num_stages, latency_s=0.1, held_bytes=3, input_bytes=1)
    timed(lambda: simulate(schedule, costs), steps_s)
    return Measured(steps_s, sum(map(len, bare.rows)), sum(map(len, schedule.rows)))


def build(setting: Setting) -> Schedule:
    """1F1B in which everything is recomputed."""
    return add_recompute(one_f_one_b(setting.num_stages, setting.num_microbatches), "always")


def timed(step: Callable[[], T], steps_s: list[float]) -> T:
    """The result of a step, whose seconds are appended."""
    start_s = perf_counter()
    result = step()
    steps_s.append(perf_counter() - start_s)
    return result


def line(setting: Setting, measured: Measured) -> str:
    """One row of the table; memory is the most that the process has had so far."""
    total_s = sum(measured.steps_s)
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    per_action_us = total_s / measured.num_computing * 1e6
    cells = [
        f"{setting.num_stages:>4} {setting.num_microbatches:>5} {measured.num_computing:>9}",
        f"{measured.num_actions:>9}",
        *(
            f"{step_s:>{len(name)}.2f}"
            for name, step_s in zip(STEPS, measured.steps_s, strict=True)
        ),
        f"{total_s:>6.2f} {aim(total_s, setting.aim_s):>16} {per_action_us:>9.1f}",
        f"{peak_gb:>5.2f} {aim(peak_gb, setting.aim_gb):>14}",
    ]
    return "  ".join(cells).rstrip()


def aim(value: float, limit: float | None) -> str:
    """The aim, and whether it is met; nothing where there is none."""
    return "" if limit is None else f"<= {limit:g} {'met' if value <= limit else 'not met'}"


def main() -> None:
    """Measure every setting and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="the fastest of so many counts (3)")
    num_rounds = parser.parse_args().rounds
    print(f"1F1B with recompute, torch-free, seconds; the fastest of {num_rounds} rounds.\n")
    head = f"{'K':>4} {'M':>5} {'computing':>9}  {'actions':>9}  {'  '.join(STEPS)}"
    print(f"{head}  {'total':>6} {'aim':>16} {'us/action':>9}  {'GB':>5} {'aim':>14}")
    for setting in SETTINGS:
        rounds = [measure(setting) for _ in range(num_rounds)]
        fastest = min(rounds, key=lambda each: sum(each.steps_s))
        print(line(setting, fastest), flush=True)


if __name__ == "__main__":
    main()
