"""Rows for measuring the layers of a run."""

from typing import Any, NamedTuple, Self

import torch
from torch import nn

from gpipe.balance import balance_by_flops, balance_by_memory, balance_by_time
from gpipe.data import Splits
from gpipe.pipeline import num_workers_of
from gpipe.profiling.subject import LossFunction
from gpipe.stage.device import HOST, default_devices
from gpipe.train.batches import in_order, num_rows
from gpipe.train.config import RunConfig
from gpipe.train.loss import Loss
from gpipe.train.optimizer import state_share

__all__ = ["Sample", "autocast_of", "balance_by", "rows_per_minibatch"]

_BALANCERS = {
    "time": balance_by_time,
    "memory": balance_by_memory,
    "flops": balance_by_flops,
}


class Sample(NamedTuple):
    """One micro-batch, with the loss behind it.

    Attributes:
        input: What the model takes.
        target: What the loss takes besides.
        loss_fn: The loss, as one number.
    """

    input: Any
    target: Any
    loss_fn: LossFunction

    @classmethod
    def of(cls, config: RunConfig, splits: Splits, loss: Loss) -> Self:
        """The first rows of the data, as many as the largest micro-batch has."""
        rows = rows_per_minibatch(config, splits)
        batch = next(in_order(splits.train, -(-rows // min(rows, config.pipeline.chunks))))
        return cls(batch.input, batch.target, _one_number(loss))

    @property
    def keywords(self) -> dict[str, Any]:
        """Those of the profilers, but for the input."""
        return {"target": self.target, "loss_fn": self.loss_fn}


def balance_by(
    by: str, num_stages: int, module: nn.Sequential, sample: Sample, config: RunConfig
) -> list[int]:
    """The layers of each stage, balanced by time, memory or flops."""
    options = sample.keywords | _options(by, config)
    with autocast_of(config):
        return _BALANCERS[by](num_stages, module, sample.input, **options)


def autocast_of(config: RunConfig) -> torch.autocast:
    """As the run will compute: other kernels and half the activations under bf16."""
    device = (default_devices() or [HOST])[0]
    return torch.autocast(device.type, torch.bfloat16, enabled=config.train.precision == "bf16")


def _options(by: str, config: RunConfig) -> dict[str, Any]:
    """What one balancer wants to know, and no other."""
    if by == "memory":
        return {"optimizer_copies": state_share(config.optimizer)}
    if by == "time":
        pipeline = config.pipeline
        return {"num_workers": num_workers_of(pipeline.schedule, pipeline.devices)}
    return {}


def rows_per_minibatch(config: RunConfig, splits: Splits) -> int:
    """What a replica gets of a whole mini-batch: never more than there are."""
    return -(-min(config.data.batch_size, num_rows(splits.train)) // config.pipeline.replicas)


def _one_number(loss: Loss) -> LossFunction:
    if loss.reduction != "weighted":
        return loss.function
    return lambda output, target: loss.function(output, target)[0]
