"""What a plan predicts, beside what is measured: memory of each stage, time of a step."""

import argparse
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.sleep import Sleeper
from gpipe import GPipe
from gpipe.balance import balance_costs
from gpipe.models import mlp, next_token_loss, transformer
from gpipe.plan import Plan, plan
from gpipe.profiling import profile, profile_memory
from gpipe.schedule import LOOPED_SCHEDULES
from gpipe.train.overhead import measured_action_s
from tests.members import CHECKPOINT_MODES
from tests.profiling.held_bytes import peak_bytes

SCHEDULES = ("fill_drain", "1f1b", "interleaved_1f1b")
CHUNKS = 8
AIM_BYTES, AIM_SLEEPING, AIM_CPU = 0.10, 0.10, 0.20
NUM_STEPS = 9  # of which the median is taken


class Model(NamedTuple):
    """A model with a mini-batch and its loss."""

    module: nn.Sequential
    x: Tensor
    y: Tensor
    loss_fn: Callable[[Any, Any], Tensor]


def perceptron(width: int, rows: int) -> Model:
    """Linear layers."""
    module = mlp([64, *[width] * 6, 10], dropout=0.1)
    return Model(module, torch.randn(rows, 64), _digits(rows), functional.cross_entropy)


def convolutions(channels: int, rows: int) -> Model:
    """Convolutions with batch normalisation and layers that write in place."""

    def block(num_inputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(num_inputs, channels, 3, padding=1)
        return [convolution, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]

    layers = [*block(3), *block(channels), *block(channels), *block(channels)]
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    x = torch.randn(rows, 3, 16, 16)
    return Model(nn.Sequential(*layers, *ends), x, _digits(rows), functional.cross_entropy)


def attention(width: int, rows: int) -> Model:
    """A Transformer that predicts the next token."""
    tokens = torch.randint(50, (rows, 32))
    return Model(transformer(6, width, 4, 50), tokens, tokens, next_token_loss)


def sleepers(rows: int) -> Model:
    """Layers that sleep and compute nothing: devices of their own, as far as the CPU can tell."""
    lengths_s = (0.010, 0.015, 0.010, 0.020, 0.012, 0.010, 0.010, 0.015)
    module = nn.Sequential(*(Sleeper(length_s, 2 * length_s) for length_s in lengths_s))
    return Model(module, torch.ones(rows, 1), torch.ones(rows, 1), functional.mse_loss)


def _digits(*shape: int) -> Tensor:
    return torch.randint(10, shape)


def sizes_of(schedule: str, num_workers: int) -> int:
    """How many stages the workers share."""
    return num_workers * (2 if schedule in LOOPED_SCHEDULES else 1)


class Row(NamedTuple):
    """One number, predicted and measured."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """How far the prediction is off, as a part of what was measured."""
        return abs(self.predicted / self.measured - 1)


def memory_rows() -> Iterator[Row]:
    """What each stage holds of micro-batches at its peak."""
    models = {
        "mlp": perceptron(128, 40),
        "convolutions": convolutions(16, 40),
        "transformer": attention(32, 40),
    }
    for name, model in models.items():
        rows = len(model.x) // CHUNKS
        costs = profile_memory(
            model.module, model.x[:rows], target=model.y[:rows], loss_fn=model.loss_fn
        )
        for schedule in SCHEDULES:
            for checkpoint in CHECKPOINT_MODES:
                balance = _even(len(model.module), sizes_of(schedule, 2))
                made = _planned(costs, balance, len(model.x), schedule, checkpoint)
                pipe = _piped(model, balance, schedule, checkpoint)
                train = partial(pipe.step, model.x, model.y, model.loss_fn)
                for stage, measured in enumerate(peak_bytes(pipe, train, [model.y])):
                    predicted = made.memory[stage].activation_bytes
                    label = f"{name}, {schedule}, {checkpoint}, stage {stage}"
                    yield Row(label, predicted, measured)


def time_rows(models: dict[str, Model], num_workers: int) -> Iterator[Row]:
    """How long a step takes from its first action to its last."""
    for name, model in models.items():
        rows = len(model.x) // CHUNKS
        costs = profile(
            model.module, model.x[:rows], target=model.y[:rows], loss_fn=model.loss_fn,
            num_threads=1,
        )  # fmt: skip
        costs = replace(costs, action_s=measured_action_s())
        for schedule in SCHEDULES:
            balance = balance_costs(costs.times_s, sizes_of(schedule, num_workers))
            for checkpoint in ("never", "always"):
                made = _planned(costs, balance, len(model.x), schedule, checkpoint, num_workers)
                pipe = _piped(model, balance, schedule, checkpoint, num_workers)
                label = f"{name}, {schedule}, {checkpoint}, K={num_workers}"
                yield Row(label, made.step_s, _step_s(pipe, model))


def _planned(
    costs: Any,
    balance: list[int],
    rows: int,
    schedule: str,
    checkpoint: str,
    num_workers: int = 2,
) -> Plan:
    return plan(
        costs, balance, rows=rows, chunks=CHUNKS, schedule=schedule, checkpoint=checkpoint,
        num_workers=num_workers,
    )  # fmt: skip


def _piped(
    model: Model, balance: list[int], schedule: str, checkpoint: str, num_workers: int = 2
) -> GPipe:
    return GPipe(
        model.module, balance, CHUNKS, schedule=schedule, checkpoint=checkpoint,
        devices=["cpu"] * num_workers,
    )  # fmt: skip


def _step_s(pipe: GPipe, model: Model) -> float:
    lengths_s = []
    for step in range(NUM_STEPS + 2):  # recomputes are looked at in the first two
        pipe.zero_grad()
        timeline = pipe.step(model.x, model.y, model.loss_fn).timeline
        assert timeline is not None, "in training mode every step has one"
        if step >= 2:
            lengths_s.append(timeline.makespan_s)
    return median(lengths_s)


def _even(num_layers: int, num_stages: int) -> list[int]:
    size, more = divmod(num_layers, num_stages)
    return [size + (stage < more) for stage in range(num_stages)]


def show(title: str, rows: Iterator[Row], aim: float, unit: str, scale: float) -> None:
    """Print both numbers of each row, and whether all are within the aim."""
    print(f"\n{title}\n{'predicted':>12} {'measured':>12} {'error':>7}")
    worst = 0.0
    for row in rows:
        worst = max(worst, row.error)
        both = f"{row.predicted / scale:>9.2f} {unit} {row.measured / scale:>9.2f} {unit}"
        print(f"{both} {row.error:>6.1%}  {row.name}", flush=True)
    print(f"worst: {worst:.1%}, aim {aim:.0%}: {'met' if worst <= aim else 'not met'}")


def main() -> None:
    """Print all of it, or one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["memory", "sleeping", "cpu"])
    parts = parser.parse_args().parts
    torch.manual_seed(0)
    torch.set_num_threads(2)  # one for each of two workers
    gc.disable()
    if "memory" in parts:
        show("Activations of each stage", memory_rows(), AIM_BYTES, "KiB", 1024)
    if "sleeping" in parts:
        rows = time_rows({"sleeping layers": sleepers(CHUNKS)}, 4)
        show("A step of layers that sleep", rows, AIM_SLEEPING, "ms ", 0.001)
    if "cpu" in parts:
        models = {
            "mlp": perceptron(1024, 512),
            "convolutions": convolutions(32, 64),
            "transformer": attention(128, 64),
        }
        show("A step on two cores", time_rows(models, 2), AIM_CPU, "ms ", 0.001)


if __name__ == "__main__":
    main()
