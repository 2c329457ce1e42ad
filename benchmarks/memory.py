"""What each stage holds at most, beside the formula: a Markdown table."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from gpipe import GPipe
from tests.live_bytes import formula, held, layers, peak_bytes
from tests.members import CHECKPOINT_MODES, train_once

NUM_STAGES = 4
NUM_MICROBATCHES = 8
NUM_LAYERS = 16
ROWS = 64  # of a mini-batch
WIDTH = 64
WAYS = {
    "`step`, 1F1B": ("step", "1f1b"),
    "`step`, fill-drain": ("step", "fill_drain"),
    "`model(x)`": ("backward", "fill_drain"),
}


def table() -> str:
    """The whole table, with a row for each way to train and each checkpoint mode."""
    stages = [f"stage {stage}" for stage in range(NUM_STAGES)]
    one_device = row("not cut at all", "step", "1f1b", "never", 1, 1)
    lines = [
        line(["", "checkpoint", *stages]),
        line(["---", "---", *("--:" for _ in stages)]),
        line([*one_device, *("" for _ in stages[1:])]),
    ]
    for label, (face, schedule) in WAYS.items():
        for checkpoint in CHECKPOINT_MODES:
            sizes = NUM_STAGES, NUM_MICROBATCHES
            lines.append(line(row(label, face, schedule, checkpoint, *sizes)))
    return "\n".join(lines)


def row(
    label: str, face: str, schedule: str, checkpoint: str, num_stages: int, num_microbatches: int
) -> list[str]:
    """Formula and measurement of every stage."""
    module = layers(NUM_LAYERS, WIDTH)
    layers_per_stage = NUM_LAYERS // num_stages
    balance = [layers_per_stage] * num_stages
    model = GPipe(module, balance, num_microbatches, schedule=schedule, checkpoint=checkpoint)
    x = torch.randn(ROWS, WIDTH)
    measured = peak_bytes(model, partial(train_once, model, face, x, x, loss_fn))
    boundary_bytes = x.nbytes // num_microbatches
    inside_bytes = layers_per_stage * boundary_bytes
    counts = (held(schedule, stage, num_stages, num_microbatches) for stage in range(num_stages))
    expected = [formula(count, checkpoint, boundary_bytes, inside_bytes) for count in counts]
    return [label, f'"{checkpoint}"', *cells(expected, measured)]


def cells(expected: list[int], measured: list[int]) -> Iterator[str]:
    """Both in KiB."""
    for each, found in zip(expected, measured, strict=True):
        yield f"{each / 1024:g} / {found / 1024:g}"


def line(texts: list[str]) -> str:
    """One line of the table."""
    return f"| {' | '.join(texts)} |"


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Saves nothing, so that the last stage is like the others."""
    return output.sum()


if __name__ == "__main__":
    print(table())
