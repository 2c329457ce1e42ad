"""`gpipe plan` and `gpipe balance`: a run file's model, planned before it runs."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpipe.balance import balance_costs, layer_bytes, layer_flops
from gpipe.costs import LayerCosts
from gpipe.errors import ConfigError, PlanError, ScheduleError
from gpipe.pipeline import num_workers_of
from gpipe.plan import Grid, plan, search
from gpipe.plan.text import found_text, plan_text
from gpipe.stage.device import default_devices
from gpipe.train.config import RunConfig
from gpipe.train.costing import Task, subject_of
from gpipe.train.fit import require_fit
from gpipe.train.layout import Layout, layout_of, num_devices_of
from gpipe.train.machine import device_spec_of
from gpipe.train.mistake import Mistake, RunFileError
from gpipe.train.optimizer import state_share
from gpipe.units import show_bytes

__all__ = ["balance_text", "best_text", "run_text"]


def run_text(config: RunConfig, profile_file: Path | None = None) -> Iterator[str]:
    """The plan of the run as the file says it, in lines.

    Raises:
        PlanError: It does not fit; raised when everything else has been said.
        ConfigError: The run file, or the profile, names what cannot be had.
    """
    pipeline, layout, device = config.pipeline, layout_of(config), device_spec_of(config)
    kept = state_share(config.optimizer)
    task = Task(layout.num_workers, layout, needs_flops=pipeline.balance == "flops")
    subject = subject_of(config, task, profile_file)
    with _as_mistake("pipeline"):
        made = plan(
            subject.costs,
            _balance(config, subject.costs, layout.num_stages, kept),
            rows=subject.rows,
            chunks=pipeline.chunks,
            schedule=pipeline.schedule,
            checkpoint=pipeline.checkpoint,
            num_workers=layout.num_workers,
            devices=device,
            optimizer_bytes_per_gradient_byte=kept,
            accumulates=config.plan.accumulates,
            num_replicas=pipeline.replicas,
        )
    yield plan_text(made, pipeline.schedule, subject.rows)
    require_fit(made, subject.rows)


def best_text(config: RunConfig, profile_file: Path | None = None) -> Iterator[str]:
    """The best ways to run the model, in lines.

    Raises:
        PlanError: None fits.
        ConfigError: The run file, or the profile, names what cannot be had.
    """
    num_devices, device = _most_devices(config), device_spec_of(config)
    kept = state_share(config.optimizer)
    subject = subject_of(config, Task(num_devices, None), profile_file)
    rows, least_rows = subject.rows, 1 if subject.refusal is None else 2
    grid = Grid(
        num_devices=range(1, min(num_devices, subject.costs.num_layers) + 1),
        chunks=[2**power for power in range((rows // least_rows).bit_length())],
    )
    found = search(
        subject.costs,
        grid,
        rows=rows,
        devices=device,
        optimizer_bytes_per_gradient_byte=kept,
        accumulates=config.plan.accumulates,
        num_replicas=config.pipeline.replicas,
        progress=sys.stderr.isatty(),
    )
    yield found_text(found, rows)
    if subject.refusal is not None:
        yield f"\nMicro-batches of 1 row are left out, which the model refuses: {subject.refusal}"


def balance_text(
    config: RunConfig, num_stages: int, by: str, objective: str, profile_file: Path | None = None
) -> Iterator[str]:
    """Each layer with its cost and its stage, and the line for the run file.

    Raises:
        PlanError: There are fewer layers than stages.
        ConfigError: The run file, or the profile, names what cannot be had.
    """
    kept = state_share(config.optimizer)
    num_workers = num_workers_of(config.pipeline.schedule, config.pipeline.devices) or num_stages
    task = Task(
        min(num_workers, num_stages),
        Layout(num_stages, num_workers),
        needs_times=by == "time",
        needs_flops=by == "flops",
    )
    costs = subject_of(_without_list(config), task, profile_file).costs
    numbers = _numbers(costs, by, kept)
    with _as_mistake("pipeline.stages"):
        balance = balance_costs(numbers, num_stages, objective)
    yield from _shown_stages(costs, balance, numbers, by)
    yield f"\nbalance: {balance}"


def _without_list(config: RunConfig) -> RunConfig:
    """What is asked for instead of the cut that the file lists."""
    pipeline = config.pipeline.model_copy(update={"balance": "parameters"})
    return config.model_copy(update={"pipeline": pipeline})


def _shown_stages(
    costs: LayerCosts, balance: Sequence[int], numbers: Sequence[float], by: str
) -> Iterator[str]:
    total, first = sum(numbers), 0
    width = max(map(len, costs.names))
    for stage, size in enumerate(balance):
        layers = range(first, first + size)
        share = sum(numbers[layer] for layer in layers)
        part = share / total if total else 1 / len(balance)
        yield f"stage {stage}: {_shown(share, by)}, {part:.1%} of {_shown(total, by)}"
        for layer in layers:
            yield f"  {layer:>4}  {costs.names[layer]:<{width}}  {_shown(numbers[layer], by)}"
        first += size


def _most_devices(config: RunConfig) -> int:
    """How many devices a search may use."""
    balance = config.pipeline.balance
    listed = None if isinstance(balance, str) else len(balance)
    told = num_devices_of(config) or config.pipeline.stages or listed
    return told or max(1, len(default_devices()))


@contextmanager
def _as_mistake(key: str) -> Iterator[None]:
    """What does not go together is a mistake in the run file."""
    try:
        yield
    except (TypeError, ValueError, PlanError, ScheduleError) as error:
        raise RunFileError([Mistake(key, str(error))]) from error


def _balance(
    config: RunConfig, costs: LayerCosts, num_stages: int, optimizer_share: float
) -> Sequence[int]:
    by = config.pipeline.balance
    if not isinstance(by, str):
        return by
    return balance_costs(_numbers(costs, by, optimizer_share), num_stages)


def _numbers(costs: LayerCosts, by: str, optimizer_share: float) -> list[float]:
    """The cost of each layer in one respect."""
    if by == "time":
        if not sum(costs.times_s):
            raise ConfigError(
                "The profile was counted and has no times. Say with plan.flops what a device does, "
                "or measure into another file."
            )
        return list(costs.times_s)
    if by == "flops":
        flops = layer_flops(costs)
        if flops is None:
            raise ConfigError(
                "The layers were measured, and their floating-point operations are not known. "
                "Set plan.flops, so that they are counted, or balance by time."
            )
        return flops
    if by == "parameters":
        return list(map(sum, zip(costs.parameter_bytes, costs.buffer_bytes, strict=True)))
    return layer_bytes(costs, optimizer_share)


def _shown(number: float, by: str) -> str:
    if by == "time":
        return f"{number * 1000:.3f} ms"
    return f"{number:,.0f} flop a row" if by == "flops" else show_bytes(number)
