"""From a checked run file to everything that a run needs."""

from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpipe.data import Splits
from gpipe.errors import GpipeError, PlanError
from gpipe.pipeline import GPipe
from gpipe.stage.device import HOST, default_devices
from gpipe.stage.materialise import materialise
from gpipe.stage.on_meta import built_on_meta
from gpipe.train.batches import num_batches
from gpipe.train.config import PipelineConfig, RunConfig
from gpipe.train.factory import Factory, resolve_factory
from gpipe.train.loss import Loss, build_loss
from gpipe.train.lr_schedule import build_lr_schedule
from gpipe.train.mistake import Mistake, Mistakes, RunFileError
from gpipe.train.optimizer import build_optimizer, resolve_optimizer
from gpipe.train.sample import Sample, balance_by
from gpipe.train.team import Team

__all__ = ["Run", "build", "num_stages_of", "resolve_all", "sequential", "splits_of"]


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


def build(config: RunConfig, team: Team | None = None) -> Run:
    """Makes everything, or says what is wrong before anything has started.

    The weights of the model depend on the seed alone, however many processes there are. torch is
    seeded once more when they are made.

    Args:
        config: The run file.
        team: The processes of the run, all of which call this; None where there is one.

    Raises:
        ConfigError: The run file names or asks for something that cannot be had.
    """
    team = team or Team()
    model_factory, data_factory, loss = resolve_all(config)
    splits = splits_of(data_factory)
    team.require_rows(config, splits)
    make = partial(first_module, model_factory, config.seed)
    model = _pipeline(config, make, Sample.of(config, splits, loss), team)
    torch.manual_seed(config.seed)
    optimizer = build_optimizer(config.optimizer, _parameters(model))
    num_steps = config.train.epochs * num_batches(splits.train, config.data.batch_size)
    return Run(
        config=_resolved(config, model),
        model=model,
        splits=splits,
        loss=loss,
        optimizer=optimizer,
        lr_schedule=build_lr_schedule(config.lr_schedule, optimizer, num_steps),
    )


def resolve_all(config: RunConfig) -> tuple[Factory, Factory, Loss]:
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


def sequential(factory: Factory) -> nn.Sequential:
    """The model that the factory makes.

    Raises:
        RunFileError: It is no Sequential.
    """
    module = factory()
    if not isinstance(module, nn.Sequential):
        text = f"{factory.name} returns a {type(module).__name__}. Return an nn.Sequential."
        raise RunFileError([Mistake("model.factory", text)])
    return module


def first_module(factory: Factory, seed: int) -> nn.Sequential:
    """The model with its first values, or on meta, where these can be made layer by layer.

    Raises:
        RunFileError: The factory makes no Sequential.
    """
    on_meta = built_on_meta(partial(sequential, factory)).module
    if isinstance(on_meta, nn.Sequential):
        return on_meta
    torch.manual_seed(seed)
    return sequential(factory)


def real(module: nn.Sequential, seed: int) -> nn.Sequential:
    """The same with its first values, all of them on the host."""
    layers = dict(enumerate(module))
    materialise(layers, layers, HOST, seed)
    return module


def splits_of(factory: Factory) -> Splits:
    """The data that the factory gives.

    Raises:
        RunFileError: They are no splits, or one has no rows.
    """
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


def _parameters(model: GPipe) -> list[nn.Parameter]:
    """Those of this process; an empty one where it has none, which an optimizer refuses."""
    return list(model.parameters()) or [nn.Parameter(torch.empty(0))]


def _pipeline(
    run: RunConfig, make: Callable[[], nn.Sequential], sample: Sample, team: Team
) -> GPipe:
    config = run.pipeline
    module = make()
    try:
        balance = team.told(_balance(run, make, sample, team) if team.is_main else None)
    except PlanError as error:
        raise RunFileError([Mistake(_blame(error, config, module), str(error))]) from error
    try:
        return GPipe(
            module,
            balance,
            config.chunks,
            checkpoint=config.checkpoint,
            schedule=config.schedule,
            devices=config.devices,
            deferred_batch_norm=config.deferred_batch_norm,
            mesh=team.mesh,
            all_reduce=config.all_reduce,
            patience_s=config.patience_s,
            watchdog_s=config.watchdog_s,
            seed=run.seed,
        )
    except (TypeError, ValueError, GpipeError) as error:
        raise RunFileError([Mistake(_blame(error, config, module), str(error))]) from error


def num_stages_of(config: PipelineConfig, num_workers: int | None = None) -> int:
    """How many stages there are to be where no list says so."""
    return config.stages or num_workers or len(config.devices or default_devices()) or 1


def _balance(
    run: RunConfig, make: Callable[[], nn.Sequential], sample: Sample, team: Team
) -> int | list[int] | None:
    """The layers of each stage; their number where parameters say the rest."""
    config = run.pipeline
    if not isinstance(config.balance, str):
        return list(config.balance)
    num_stages = num_stages_of(config, team.num_workers)
    if config.balance == "parameters" or num_stages == 1:
        return config.stages
    module = real(make(), run.seed)
    return balance_by(config.balance, num_stages, module, sample, run)


def _blame(error: Exception, config: PipelineConfig, module: nn.Sequential) -> str:
    """The key whose value is at fault."""
    if not isinstance(config.balance, str) and sum(config.balance) != len(module):
        return "pipeline.balance"
    if config.stages is not None and config.stages > len(module):
        return "pipeline.stages"
    # The types of all keys have been checked: what is left of a wrong type is the model.
    return "model.factory" if isinstance(error, TypeError) else "pipeline"


def _resolved(config: RunConfig, model: GPipe) -> RunConfig:
    # A balance that was measured would come out a little different the next time.
    found = {"stages": len(model.balance), "balance": config.pipeline.balance}
    if isinstance(config.pipeline.balance, str) and config.pipeline.balance != "parameters":
        found["balance"] = tuple(model.balance)
    pipeline = config.pipeline.model_copy(update=found)
    return config.model_copy(update={"pipeline": pipeline})
