"""Counts the bytes of activations that live on each stage, and says how many there should be."""

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe import GPipe

NUM_LEARNING = 2  # mini-batches, from the first, that copy inputs and compare recomputes


class _Held(NamedTuple):
    num_bytes: int
    is_gone: Callable[[], bool]


class LiveBytes:
    """Watches what each stage of a model holds, as long as it is entered.

    Saved-tensor hooks, which the workers take over from the caller, see what autograd saves; hooks
    of the first and the last layer of a stage see its inputs and outputs. Only weak references are
    kept. What autograd saved lives as long as its storage, which counts once on a stage. On one
    device the storage of an input or output is also the caller's or the neighbour's, so these live
    as long as the stage's own tensor does. The layers may therefore save neither the input nor the
    output of their stage; `layers` are such.

    Attributes:
        peak: The most bytes that each stage held at once, in the midst of an action.
    """

    def __init__(self, model: GPipe) -> None:
        self.peak = [0] * len(model.stages)
        self._stages = model.stages
        tensors = (*model.parameters(), *model.buffers())
        self._not_counted = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._held: list[dict[tuple[int, int], _Held]] = [{} for _ in model.stages]
        self._here = threading.local()
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        for stage in self._stages:
            first, *_, last = (stage.layers[0], *stage.layers)
            before = first.register_forward_pre_hook(self._seeing_input(stage.index))
            after = last.register_forward_hook(self._seeing_output(stage.index))
            self._exit.callback(before.remove)
            self._exit.callback(after.remove)
        self._exit.enter_context(saved_tensors_hooks(self._see_saved, lambda tensor: tensor))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def now(self) -> list[int]:
        """The bytes that each stage holds."""
        return [self._sum(stage) for stage in range(len(self._held))]

    def _seeing_input(self, stage: int) -> Callable[..., None]:
        def see(_: nn.Module, args: tuple[Tensor]) -> None:
            self._here.stage = stage  # a stage is always on the same thread
            self._hold_tensor(stage, args[0])
            self._note_peak(stage)

        return see

    def _seeing_output(self, stage: int) -> Callable[..., None]:
        # An output that is on its way is no part of the peak; one that stays will be.
        return lambda _module, _args, output: self._hold_tensor(stage, output)

    def _see_saved(self, tensor: Tensor) -> Tensor:
        stage = getattr(self._here, "stage", None)
        storage = tensor.untyped_storage()
        if stage is not None and storage._cdata not in self._not_counted:
            # The reference keeps the address from being used again, so it may serve as the key.
            life = _Held(storage.nbytes(), StorageWeakRef(storage).expired)
            self._held[stage][storage._cdata, 0] = life
            self._note_peak(stage)
        return tensor.detach()  # an output that a node saves must not refer to that node

    def _hold_tensor(self, stage: int, tensor: Tensor) -> None:
        reference = weakref.ref(tensor)
        key = tensor.untyped_storage()._cdata, tensor.storage_offset()
        self._held[stage][key] = _Held(tensor.nbytes, lambda: reference() is None)

    def _note_peak(self, stage: int) -> None:
        self.peak[stage] = max(self.peak[stage], self._sum(stage))

    def _sum(self, stage: int) -> int:
        alive = {key: held for key, held in self._held[stage].items() if not held.is_gone()}
        self._held[stage] = alive
        return sum(held.num_bytes for held in alive.values())


def layers(num_layers: int, width: int) -> nn.Sequential:
    """Layers that each save one tensor, as large as a boundary, and none of it is a boundary."""
    torch.manual_seed(0)
    pairs = (nn.Sequential(nn.Tanh(), nn.Linear(width, width)) for _ in range(num_layers))
    return nn.Sequential(*pairs)


def peak_bytes(model: GPipe, train: Callable[[], Any]) -> list[int]:
    """What each stage holds at most while a mini-batch is trained on."""
    for _ in range(NUM_LEARNING):
        train()
    with LiveBytes(model) as live:
        train()
    return live.peak


def held(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """How many micro-batches a stage holds at most."""
    if schedule == "1f1b":
        return min(num_stages - stage, num_microbatches)
    return num_microbatches


def formula(num_held: int, checkpoint: str, boundary_bytes: int, inside_bytes: int) -> int:
    """The bytes that a stage holds at most.

    Args:
        num_held: How many micro-batches it holds.
        checkpoint: The mode; a stage that recomputes has the inside of one micro-batch at a time.
        boundary_bytes: The input of the stage, for one micro-batch.
        inside_bytes: What its layers save of one micro-batch.
    """
    num_inside = num_held if checkpoint == "never" else 1
    return num_held * boundary_bytes + num_inside * inside_bytes
