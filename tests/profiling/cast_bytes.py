"""Counts the bytes of cast weights that each stage of a model holds at most."""

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe import GPipe

NUM_LEARNING = 2


class CastBytes(TorchDispatchMode):
    """Sees each weight that is cast, and for how long the copy lives."""

    def __init__(self, model: GPipe) -> None:
        super().__init__()
        self.peak = [0] * len(model.stages)
        self._copies: list[list[tuple[StorageWeakRef, int]]] = [[] for _ in model.stages]
        self._stage_of = {
            parameter.untyped_storage()._cdata: stage.index
            for stage in model.stages
            for layer in stage.layers
            for parameter in layer.parameters()
        }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            stage = self._stage_of.get(args[0].untyped_storage()._cdata)
            if stage is not None:
                storage = output.untyped_storage()
                self._copies[stage].append((StorageWeakRef(storage), storage.nbytes()))
                self.peak[stage] = max(self.peak[stage], self._held(stage))
        return output

    def _held(self, stage: int) -> int:
        return sum(size for life, size in self._copies[stage] if not life.expired())


def peak_cast_bytes(model: GPipe, train: Callable[[], Any]) -> list[int]:
    """What each stage holds at most while a mini-batch is trained on."""
    for _ in range(NUM_LEARNING):
        train()
    with CastBytes(model) as casts:
        train()
    return casts.peak
