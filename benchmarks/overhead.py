"""What exactness costs: microseconds per micro-batch with tiny layers."""

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torchgpipe
from torch import nn

from gpipe import GPipe

NUM_STAGES = 2
NUM_MICROBATCHES = 32
ROWS = 4  # of a micro-batch
WIDTH = 16
NUM_WARM_UP = 3  # mini-batches; the first two of a GPipe look closely

PLAIN = "plain loop"
PEER = "torchgpipe"
MODES = ("never", "always")


class Setting(NamedTuple):
    """What is measured, and what is aimed at: ratios, none where there is no aim."""

    title: str
    layers: Callable[[], list[nn.Module]]
    of_plain: float | None = None
    of_peer: tuple[float | None, float | None] = (None, None)  # as in MODES


class Contender(NamedTuple):
    """One way to train: the module that gets the gradients, and a mini-batch."""

    module: nn.Module
    train: Callable[[], None]


def linear() -> nn.Module:
    """The tiniest layer that learns."""
    return nn.Linear(WIDTH, WIDTH)


SETTINGS = (
    Setting("1 layer a stage", lambda: [linear()], 1.5, (0.65, 0.42)),
    Setting("16 layers a stage", lambda: [linear() for _ in range(16)], 1.15),
    Setting("1 layer and Dropout a stage", lambda: [linear(), nn.Dropout(0.1)]),
)


def contenders(setting: Setting) -> dict[str, Contender]:
    """Everyone, by name, each with a model of its own."""
    x, y = torch.randn(2, NUM_MICROBATCHES * ROWS, WIDTH)
    loss_fn = nn.MSELoss()

    def module() -> nn.Sequential:
        return nn.Sequential(*(layer for _ in range(NUM_STAGES) for layer in setting.layers()))

    def plain_loop() -> Contender:
        model = module()

        def train() -> None:
            parts = zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True)
            for part, target in parts:
                (loss_fn(model(part), target) / NUM_MICROBATCHES).backward()

        return Contender(model, train)

    def by_step(model: GPipe) -> Contender:
        return Contender(model, lambda: model.step(x, y, loss_fn))

    def as_module(model: nn.Module) -> Contender:
        return Contender(model, lambda: loss_fn(model(x), y).backward())

    balance = [len(setting.layers())] * NUM_STAGES
    found = {PLAIN: plain_loop()}
    for mode in MODES:
        ours = {"chunks": NUM_MICROBATCHES, "checkpoint": mode}
        theirs = ours | {"devices": ["cpu"] * NUM_STAGES}
        for label, schedule in ("1F1B", "1f1b"), ("fill-drain", "fill_drain"):
            model = GPipe(module(), balance, schedule=schedule, **ours)
            found[f"GPipe.step, {label}, {mode}"] = by_step(model)
        found[f"GPipe.forward, {mode}"] = as_module(GPipe(module(), balance, **ours))
        found[f"{PEER}, {mode}"] = as_module(torchgpipe.GPipe(module(), balance, **theirs))
    return found


def measure(everyone: dict[str, Contender], num_rounds: int) -> dict[str, float]:
    """The median time of each in microseconds per micro-batch; they take turns."""
    times_s: dict[str, list[float]] = {name: [] for name in everyone}
    for number in range(NUM_WARM_UP + num_rounds):
        for name, contender in everyone.items():
            time_s = seconds(contender)
            if number >= NUM_WARM_UP:
                times_s[name].append(time_s)
    return {name: median(times) / NUM_MICROBATCHES * 1e6 for name, times in times_s.items()}


def seconds(contender: Contender) -> float:
    """The time of one mini-batch, forward and backward."""
    contender.module.zero_grad()
    start_s = perf_counter()
    contender.train()
    return perf_counter() - start_s


def rows(setting: Setting, times_us: dict[str, float]) -> list[list[str]]:
    """The lines of the table for one setting."""
    lines = [[setting.title, "us", "of plain", "aim", "", "of torchgpipe", "aim", ""]]
    for name, time_us in times_us.items():
        mode = name.rpartition(", ")[2]
        is_ours = name.startswith("GPipe")
        plain_aim = setting.of_plain if is_ours and mode == "never" else None
        peer_aim = setting.of_peer[MODES.index(mode)] if is_ours else None
        of_plain = time_us / times_us[PLAIN]
        cells = ratio(of_plain, plain_aim)
        if is_ours:
            cells += ratio(time_us / times_us[f"{PEER}, {mode}"], peer_aim)
        lines.append([f"  {name}", f"{time_us:.0f}", *cells])
    return lines


def ratio(value: float, aim: float | None) -> list[str]:
    """A ratio, the aim, and whether it is met."""
    if aim is None:
        return [f"{value:.2f}", "", ""]
    return [f"{value:.2f}", f"<= {aim:g}", "met" if value <= aim else "not met"]


def aligned(lines: list[list[str]]) -> str:
    """Columns as wide as what is in them, the first to the left, the others to the right."""
    num_columns = max(len(line) for line in lines)
    padded = [line + [""] * (num_columns - len(line)) for line in lines]
    widths = [max(map(len, column)) for column in zip(*padded, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if index else text.ljust(width)
            for index, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in padded
    )


def main() -> None:
    """Measure every setting and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="mini-batches of each (50)")
    num_rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(
        f"Forward and backward, K = {NUM_STAGES} stages, M = {NUM_MICROBATCHES} micro-batches of "
        f"{ROWS} rows, Linear({WIDTH}, {WIDTH});\nmicroseconds per micro-batch, "
        f"medians of {num_rounds} rounds in which all take turns.\n"
    )
    lines: list[list[str]] = []
    for setting in SETTINGS:
        lines += [*rows(setting, measure(contenders(setting), num_rounds)), []]
    print(aligned(lines[:-1]))


if __name__ == "__main__":
    main()
