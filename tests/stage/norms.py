"""Norms, rows for them, and how they are trained deferred."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gpipe.stage.batchnorm import (
    Collector,
    defer_batch_norm,
)

__all__ = [
    "FEATURES",
    "SHAPES",
    "SPLITS",
    "assert_close",
    "assert_unchanged",
    "buffers",
    "data",
    "deferred",
    "lively",
    "observe",
    "train",
]

FEATURES = 3
SHAPES = {
    "1d, rows": (nn.BatchNorm1d, (FEATURES,)),
    "1d, sequences": (nn.BatchNorm1d, (FEATURES, 4)),
    "2d": (nn.BatchNorm2d, (FEATURES, 2, 3)),
    "3d": (nn.BatchNorm3d, (FEATURES, 2, 1, 2)),
}
SPLITS = [[12], [6, 6], [4, 4, 4], [5, 5, 2], [1, 11], [1] * 12]


def lively(norm: nn.Module) -> nn.Module:
    """The norm in float64, with parameters and buffers that are not those of its start."""
    torch.manual_seed(1)
    norm.double()
    for tensor in norm.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 2)
    return norm


def deferred(norm: nn.Module) -> nn.Module:
    """A deferred copy."""
    (result,) = defer_batch_norm([copy.deepcopy(norm)])
    return result


def data(shape: Iterable[int], rows: int = 12) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(rows, *shape, dtype=torch.float64) * 3 + 2


def observe(
    module: nn.Module, microbatches: Iterable[Tensor], collector: Collector
) -> list[Tensor]:
    outputs = []
    for microbatch, x in enumerate(microbatches):
        with collector.observing(microbatch):
            outputs.append(module(x))
    return outputs


def train(module: nn.Module, microbatches: Iterable[Tensor]) -> None:
    """One mini-batch, as the engine drives it."""
    collector = Collector(defer_batch_norm([module]))
    observe(module, microbatches, collector)
    collector.commit()


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_close(module: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    ours = dict(module.named_buffers())
    assert ours.keys() == dict(plain.named_buffers()).keys()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(
            ours[name], buffer, **tolerance or {"rtol": 1e-12, "atol": 1e-12}
        )


def assert_unchanged(module: nn.Module, before: dict[str, Tensor]) -> None:
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
