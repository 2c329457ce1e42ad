"""What the layers of a run cost, measured or counted."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from gpipe.costs import LayerCosts
from gpipe.data import Splits
from gpipe.errors import ConfigError
from gpipe.profiling import profile, profile_meta
from gpipe.train.build import resolve_all, sequential, splits_of
from gpipe.train.config import RunConfig
from gpipe.train.factory import Factory
from gpipe.train.layout import Layout, require_layers
from gpipe.train.look import look_at
from gpipe.train.loss import Loss
from gpipe.train.machine import measuring_device
from gpipe.train.mistake import Mistake, RunFileError
from gpipe.train.one_row import refusal_of_one_row, with_rows
from gpipe.train.overhead import measured_action_s
from gpipe.train.profile_file import load_profile, save_profile
from gpipe.train.sample import Sample, autocast_of, rows_per_minibatch
from gpipe.units import show_bytes

__all__ = ["Subject", "Task", "subject_of"]


class Task(NamedTuple):
    """What costs are wanted for.

    Attributes:
        num_workers: How many there are; on the CPU each has its share of the threads.
        layout: How the model is cut; None where that is searched for.
        needs_times: Whether times are used.
        needs_flops: Whether floating-point operations are used.
    """

    num_workers: int
    layout: Layout | None
    needs_times: bool = True
    needs_flops: bool = False


class Subject(NamedTuple):
    """What a run file's layers cost.

    Attributes:
        costs: Of the layers.
        rows: Those of a mini-batch.
        refusal: Why the model takes no micro-batch of one row; None where it does, or where there
            is none.
    """

    costs: LayerCosts
    rows: int
    refusal: str | None


def subject_of(config: RunConfig, task: Task, profile_file: Path | None = None) -> Subject:
    """The costs from the file where there is one, else found now and written to it.

    Whatever can be refused is refused before anything is measured.

    Raises:
        ConfigError: The run file, or the profile, names what cannot be had.
    """
    model_factory, data_factory, loss = resolve_all(config)
    kept = None if profile_file is None else load_profile(profile_file)
    if kept is not None:
        _require_same(kept, model_factory)
    if task.layout is not None:
        require_layers(config, task.layout, look_at(model_factory, len))
    splits = splits_of(data_factory)
    refusal = _refusal(config, task, model_factory, splits, loss)
    sample = Sample.of(config if refusal is None else with_rows(2, config, splits), splits, loss)
    costs = kept or _found(config, task, model_factory, sample)
    if kept is None and profile_file is not None:
        save_profile(profile_file, costs)
    if task.needs_flops and costs.forward_flops_per_row is None:
        costs = _with_flops(costs, _counted(config, model_factory, sample))
    rows = rows_per_minibatch(config, splits)
    return Subject(_timed(costs, config.plan.flops), rows, refusal)


def _refusal(
    config: RunConfig, task: Task, model_factory: Factory, splits: Splits, loss: Loss
) -> str | None:
    """Why one row is refused, where a search can do without such micro-batches."""
    rows, chunks = rows_per_minibatch(config, splits), config.pipeline.chunks
    if task.layout is not None and rows // min(rows, chunks) > 1:
        return None
    refusal = refusal_of_one_row(config, model_factory, splits, loss)
    if refusal is None or (task.layout is None and rows > 1):
        return refusal
    if rows == 1:
        text = f"is {config.data.batch_size}, which makes 1 row: {refusal}. Give two rows or more."
        raise RunFileError([Mistake("data.batch_size", text)])
    text = f"is {chunks}, which cuts {rows} rows into micro-batches of 1 row: {refusal}. Lower it "
    raise RunFileError([Mistake("pipeline.chunks", f"{text}to {rows // 2} at most.")])


def _found(config: RunConfig, task: Task, model_factory: Factory, sample: Sample) -> LayerCosts:
    torch.manual_seed(config.seed)
    if config.plan.flops is not None or not task.needs_times:
        return _counted(config, model_factory, sample)
    return _measured(config, task.num_workers, sequential(model_factory), sample)


def _measured(
    config: RunConfig, num_workers: int, module: nn.Sequential, sample: Sample
) -> LayerCosts:
    share = max(1, torch.get_num_threads() // num_workers)
    with autocast_of(config):
        costs = profile(
            module,
            sample.input,
            device=measuring_device(config),
            num_threads=share,
            progress=sys.stderr.isatty(),
            **sample.keywords,
        )
    return replace(costs, action_s=measured_action_s())


def _counted(config: RunConfig, model_factory: Factory, sample: Sample) -> LayerCosts:
    def look(module: nn.Sequential) -> LayerCosts:
        device = measuring_device(config)
        return profile_meta(module, sample.input, device=device, **sample.keywords)

    with autocast_of(config):
        return look_at(model_factory, look)


def _with_flops(costs: LayerCosts, counted: LayerCosts) -> LayerCosts:
    return replace(
        costs,
        forward_flops_per_row=counted.forward_flops_per_row,
        backward_flops_per_row=counted.backward_flops_per_row,
    )


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


def _require_same(costs: LayerCosts, model_factory: Factory) -> None:
    """Refuse the profile of another model."""
    layers = look_at(model_factory, lambda module: dict(module.named_children()))
    weights = [sum(each.nbytes for each in layer.parameters()) for layer in layers.values()]
    if list(costs.names) != list(layers) or list(costs.parameter_bytes) != weights:
        raise ConfigError(
            f"The profile has {costs.num_layers} layers with "
            f"{show_bytes(sum(costs.parameter_bytes))} of parameters, and this model has "
            f"{len(layers)} with {show_bytes(sum(weights))}: it is another model's. Name another "
            "file, and it is profiled."
        )
