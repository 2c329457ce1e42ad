"""`gpipe plan` and `gpipe balance`: a run file's model, planned before it runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from gpipe.balance import balance_costs, layer_bytes, layer_flops
from gpipe.costs import LayerCosts
from gpipe.errors import ConfigError, PlanError, ScheduleError
from gpipe.pipeline import num_workers_of
from gpipe.plan import DeviceSpec, Grid, Plan, plan, search
from gpipe.plan.text import found_text, plan_text
from gpipe.profiling import link_bytes_per_s, profile, profile_meta
from gpipe.stage.device import HOST, default_devices, device_of
from gpipe.train.build import num_stages_of, resolve_all, sequential, splits_of
from gpipe.train.config import RunConfig
from gpipe.train.factory import Factory
from gpipe.train.mistake import Mistake, RunFileError
from gpipe.train.optimizer import state_share
from gpipe.train.overhead import measured_action_s
from gpipe.train.sample import Sample, rows_per_minibatch
from gpipe.units import show_bytes

__all__ = ["balance_text", "best_text", "run_text"]

META = torch.device("meta")
T = TypeVar("T")


class _Subject(NamedTuple):
    """What a run file's layers cost, and how many rows go through them."""

    costs: LayerCosts
    rows: int


def run_text(config: RunConfig, profile_file: Path | None = None) -> Iterator[str]:
    """The plan of the run as the file says it, in lines.

    Raises:
        PlanError: It does not fit; raised when everything else has been said.
        ConfigError: The run file, or the profile, names what cannot be had.
    """
    subject = _subject(config, profile_file)
    pipeline = config.pipeline
    with _as_mistake("pipeline"):
        made = plan(
            subject.costs,
            _balance(config, subject.costs),
            rows=subject.rows,
            chunks=pipeline.chunks,
            schedule=pipeline.schedule,
            checkpoint=pipeline.checkpoint,
            num_workers=num_workers_of(pipeline.schedule, pipeline.devices),
            devices=_device(config),
            optimizer_bytes_per_gradient_byte=state_share(config.optimizer),
            accumulates=config.plan.accumulates,
        )
    num_workers = made.schedule.num_workers
    if pipeline.devices is not None and len(pipeline.devices) != num_workers:
        listed = f"lists {len(pipeline.devices)} devices for {num_workers} workers"
        raise RunFileError([Mistake("pipeline.devices", f"{listed}. List one for each.")])
    yield plan_text(made, pipeline.schedule, subject.rows)
    _require_fit(made)


def best_text(config: RunConfig, profile_file: Path | None = None) -> Iterator[str]:
    """The best ways to run the model, in lines.

    Raises:
        PlanError: None fits.
        ConfigError: The run file, or the profile, names what cannot be had.
    """
    subject = _subject(config, profile_file)
    num_devices = config.plan.devices or config.pipeline.stages or max(1, len(default_devices()))
    grid = Grid(
        num_devices=range(1, min(num_devices, subject.costs.num_layers) + 1),
        chunks=[2**power for power in range(subject.rows.bit_length())],
    )
    found = search(
        subject.costs,
        grid,
        rows=subject.rows,
        devices=_device(config),
        optimizer_bytes_per_gradient_byte=state_share(config.optimizer),
        accumulates=config.plan.accumulates,
    )
    yield found_text(found, subject.rows)


def balance_text(
    config: RunConfig, num_stages: int, by: str, objective: str, profile_file: Path | None = None
) -> Iterator[str]:
    """Each layer with its cost and its stage, and the line for the run file.

    Raises:
        PlanError: There are fewer layers than stages.
        ConfigError: The run file, or the profile, names what cannot be had.
    """
    costs = _subject(config, profile_file, by=by).costs
    numbers = _numbers(costs, by, state_share(config.optimizer))
    with _as_mistake("pipeline.stages"):
        balance = balance_costs(numbers, num_stages, objective)
    total = sum(numbers)
    width = max(map(len, costs.names))
    first = 0
    for stage, size in enumerate(balance):
        layers = range(first, first + size)
        share = sum(numbers[layer] for layer in layers)
        part = share / total if total else 1 / num_stages
        yield f"stage {stage}: {_shown(share, by)}, {part:.1%} of {_shown(total, by)}"
        for layer in layers:
            yield f"  {layer:>4}  {costs.names[layer]:<{width}}  {_shown(numbers[layer], by)}"
        first += size
    yield f"\nbalance: {balance}"


def _subject(config: RunConfig, profile_file: Path | None, by: str | None = None) -> _Subject:
    """The costs from the file where there is one, else found now and written to it."""
    model_factory, data_factory, loss = resolve_all(config)
    splits = splits_of(data_factory)
    rows = rows_per_minibatch(config, splits)
    if profile_file is not None and profile_file.exists():
        with _readable(profile_file):
            costs = LayerCosts.load(profile_file)
        _require_same(costs, model_factory)
        return _Subject(_timed(costs, config.plan.flops), rows)
    sample = Sample.of(config, splits, loss)
    is_counted = config.plan.flops is not None or by in ("flops", "memory", "parameters")
    torch.manual_seed(config.seed)
    if is_counted:
        with _autocast(config):
            costs = _seen(
                model_factory,
                lambda module: profile_meta(module, sample.input, **sample.keywords),
            )
    else:
        module = sequential(model_factory)
        costs = _measured(module, sample, config)
    if profile_file is not None:
        with _readable(profile_file):
            costs.save(profile_file)
    return _Subject(_timed(costs, config.plan.flops), rows)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"The profile {path} cannot be read or written ({error.strerror}). Name a file in a "
            "folder that exists."
        ) from error


@contextmanager
def _as_mistake(key: str) -> Iterator[None]:
    """What does not go together is a mistake in the run file."""
    try:
        yield
    except (TypeError, ValueError, PlanError, ScheduleError) as error:
        raise RunFileError([Mistake(key, str(error))]) from error


def _measured(module: nn.Sequential, sample: Sample, config: RunConfig) -> LayerCosts:
    share = max(1, torch.get_num_threads() // _num_workers(config))
    with _autocast(config):
        costs = profile(module, sample.input, num_threads=share, progress=True, **sample.keywords)
    return replace(costs, action_s=measured_action_s())


def _autocast(config: RunConfig) -> torch.autocast:
    """As the run will compute: what layers save is half as large under bf16."""
    device = (default_devices() or [HOST])[0]
    return torch.autocast(device.type, torch.bfloat16, enabled=config.train.precision == "bf16")


def _timed(costs: LayerCosts, flops_per_s: float | None) -> LayerCosts:
    """With the seconds that the operations take on a device that does so many."""
    if flops_per_s is None:
        return costs
    if costs.forward_flops_per_row is None or costs.backward_flops_per_row is None:
        raise ConfigError(
            "The profile was measured and has no floating-point operations for plan.flops. Leave "
            "plan.flops out, or name another file to count them into."
        )
    scale = costs.rows / flops_per_s
    return replace(
        costs,
        forward_s=tuple(scale * number for number in costs.forward_flops_per_row),
        backward_s=tuple(scale * number for number in costs.backward_flops_per_row),
    )


def _seen(model_factory: Factory, look: Callable[[nn.Sequential], T]) -> T:
    """Look at the model on the meta device; where it or the look needs values, at a real one."""
    try:
        with META:
            module = sequential(model_factory)
        return look(module)
    except Exception:  # noqa: BLE001 - what is wrong with the model itself shows again
        return look(sequential(model_factory))


def _require_same(costs: LayerCosts, model_factory: Factory) -> None:
    """Refuse the profile of another model."""
    layers = _seen(model_factory, lambda module: dict(module.named_children()))
    weights = [sum(each.nbytes for each in layer.parameters()) for layer in layers.values()]
    if list(costs.names) != list(layers) or list(costs.parameter_bytes) != weights:
        raise ConfigError(
            f"The profile has {costs.num_layers} layers with "
            f"{show_bytes(sum(costs.parameter_bytes))} of parameters, and this model has "
            f"{len(layers)} with {show_bytes(sum(weights))}: it is another model's. Name another "
            "file, and it is profiled."
        )


def _num_workers(config: RunConfig) -> int:
    pipeline = config.pipeline
    listed = None if isinstance(pipeline.balance, str) else len(pipeline.balance)
    return len(pipeline.devices or ()) or pipeline.stages or listed or 1


def _balance(config: RunConfig, costs: LayerCosts) -> Sequence[int]:
    pipeline = config.pipeline
    if not isinstance(pipeline.balance, str):
        return pipeline.balance
    return balance_costs(
        _numbers(costs, pipeline.balance, state_share(config.optimizer)), num_stages_of(pipeline)
    )


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


def _device(config: RunConfig) -> DeviceSpec:
    """As the file describes it, else as those here are; the memory of the CPU is nobody's limit."""
    here = [device_of(device) for device in default_devices()]
    memory_bytes, bandwidth = config.plan.memory, config.plan.bandwidth
    if memory_bytes is None and here and (memory := here[0].memory()):
        memory_bytes = memory.total_bytes
    if bandwidth is None and len(here) > 1:
        bandwidth = link_bytes_per_s(here[0], here[1])
    return DeviceSpec(
        memory_bytes=inf if memory_bytes is None else memory_bytes,
        bandwidth_bytes_per_s=bandwidth or 0.0,
        latency_s=config.plan.latency_s,
    )


def _require_fit(made: Plan) -> None:
    worker = made.crowded
    if worker is None:
        return
    needed, available = made.worker_bytes[worker], made.devices[worker].memory_bytes
    raise PlanError(
        f"Device {worker} needs {show_bytes(needed)} and has {show_bytes(available)}. See what "
        "fits with `--search`, raise pipeline.chunks, set pipeline.checkpoint: always, or use more "
        "stages."
    )


def _shown(number: float, by: str) -> str:
    if by == "time":
        return f"{number * 1000:.3f} ms"
    return f"{number:,.0f} flop a row" if by == "flops" else show_bytes(number)
