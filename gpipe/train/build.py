"""From a checked run file to everything that a run needs."""

from collections.abc import Sized
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpipe.data import Splits
from gpipe.errors import GpipeError
from gpipe.pipeline import GPipe
from gpipe.train.batches import num_batches
from gpipe.train.config import PipelineConfig, RunConfig
from gpipe.train.factory import Factory, resolve_factory
from gpipe.train.loss import Loss, build_loss
from gpipe.train.lr_schedule import build_lr_schedule
from gpipe.train.mistake import Mistake, Mistakes, RunFileError
from gpipe.train.optimizer import build_optimizer, resolve_optimizer

__all__ = ["Run", "build"]


@dataclass(frozen=True)
class Run:
    """Everything that training needs, ready to start.

    Attributes:
        config: The run file, with the number of stages filled in.
        model: The pipeline, in training mode.
        splits: What to train and to test on.
        loss: What is minimised.
        optimizer: Over all parameters of the model.
        lr_schedule: Advances once a step.
    """

    config: RunConfig
    model: GPipe
    splits: Splits
    loss: Loss
    optimizer: Optimizer
    lr_schedule: LambdaLR


def build(config: RunConfig) -> Run:
    """Makes everything, or says what is wrong before anything has started.

    torch is seeded right before the model is made: its weights depend on the seed alone.

    Raises:
        ConfigError: The run file names or asks for something that cannot be had.
    """
    model_factory, data_factory, loss = _resolve(config)
    torch.manual_seed(config.seed)
    model = _pipeline(config.pipeline, _sequential(model_factory))
    splits = _splits(data_factory)
    optimizer = build_optimizer(config.optimizer, model.parameters())
    num_steps = config.train.epochs * num_batches(splits.train, config.data.batch_size)
    return Run(
        config=_resolved(config, model),
        model=model,
        splits=splits,
        loss=loss,
        optimizer=optimizer,
        lr_schedule=build_lr_schedule(config.lr_schedule, optimizer, num_steps),
    )


def _resolve(config: RunConfig) -> tuple[Factory, Factory, Loss]:
    """Finds all that is named in the file; all that cannot be found is refused together."""
    mistakes = Mistakes()
    with mistakes.noted():
        model_factory = resolve_factory("model", config.model)
    with mistakes.noted():
        data_factory = resolve_factory("data", config.data)
    with mistakes.noted():
        loss = build_loss(config)
    with mistakes.noted():
        resolve_optimizer(config.optimizer)
    mistakes.refuse()
    return model_factory, data_factory, loss


def _sequential(factory: Factory) -> nn.Sequential:
    module = factory()
    if not isinstance(module, nn.Sequential):
        text = f"{factory.name} returns a {type(module).__name__}. Return an nn.Sequential."
        raise RunFileError([Mistake("model.factory", text)])
    return module


def _splits(factory: Factory) -> Splits:
    splits = factory()
    if not isinstance(splits, Splits):
        text = f"{factory.name} returns a {type(splits).__name__}. Return a gpipe.data.Splits."
        raise RunFileError([Mistake("data.factory", text)])
    for part in ("train", "test"):
        rows = getattr(splits, part)
        if not isinstance(rows, Sized) or not len(rows):
            text = f"{factory.name} returns no rows in `{part}`. Give a dataset with a length."
            raise RunFileError([Mistake("data.factory", text)])
    return splits


def _pipeline(config: PipelineConfig, module: nn.Sequential) -> GPipe:
    balance = config.stages if isinstance(config.balance, str) else list(config.balance)
    try:
        return GPipe(
            module,
            balance,
            config.chunks,
            checkpoint=config.checkpoint,
            schedule=config.schedule,
            devices=config.devices,
            deferred_batch_norm=config.deferred_batch_norm,
        )
    except (TypeError, ValueError, GpipeError) as error:
        raise RunFileError([Mistake(_blame(error, config, module), str(error))]) from error


def _blame(error: Exception, config: PipelineConfig, module: nn.Sequential) -> str:
    """The key whose value is at fault."""
    if not isinstance(config.balance, str) and sum(config.balance) != len(module):
        return "pipeline.balance"
    if config.stages is not None and config.stages > len(module):
        return "pipeline.stages"
    # The types of all keys have been checked: what is left of a wrong type is the model.
    return "model.factory" if isinstance(error, TypeError) else "pipeline"


def _resolved(config: RunConfig, model: GPipe) -> RunConfig:
    pipeline = config.pipeline.model_copy(update={"stages": len(model.stages)})
    return config.model_copy(update={"pipeline": pipeline})
