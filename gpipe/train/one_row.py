"""Whether a model takes micro-batches of one row."""

import warnings

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe.data import Splits
from gpipe.profiling import WorkspaceWarning, profile_memory, profile_meta
from gpipe.train.build import sequential
from gpipe.train.config import RunConfig
from gpipe.train.factory import Factory
from gpipe.train.look import look_at
from gpipe.train.loss import Loss
from gpipe.train.sample import Sample, rows_per_minibatch

__all__ = ["refusal_of_one_row", "with_rows"]


def refusal_of_one_row(
    config: RunConfig, model_factory: Factory, splits: Splits, loss: Loss
) -> str | None:
    """Why the model does not take one row while it is trained; None where it does.

    Batch normalisation does not, unless an image has further values for each channel.
    """
    if not look_at(model_factory, _has_batch_norm):
        return None
    sample = Sample.of(with_rows(1, config, splits), splits, loss)

    def look(module: nn.Sequential) -> None:
        profile_meta(module, sample.input, **sample.keywords)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WorkspaceWarning)
            look_at(model_factory, look)
    except Exception:  # noqa: BLE001 - it may be a layer that shapes are not enough for
        return _refusal(sequential(model_factory), sample)
    return None


def with_rows(microbatch_rows: int, config: RunConfig, splits: Splits) -> RunConfig:
    """The same with as few micro-batches as have so many rows."""
    chunks = -(-rows_per_minibatch(config, splits) // microbatch_rows)
    pipeline = config.pipeline.model_copy(update={"chunks": chunks})
    return config.model_copy(update={"pipeline": pipeline})


def _has_batch_norm(module: nn.Sequential) -> bool:
    return any(isinstance(each, _BatchNorm) for each in module.modules())


def _refusal(module: nn.Sequential, sample: Sample) -> str | None:
    try:
        profile_memory(module, sample.input, **sample.keywords)
    except Exception as error:  # noqa: BLE001 - it is told, whatever it is
        return " ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))])
    return None
