"""Counts the bytes that each stage of any model holds at most."""

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, Self
from unittest import mock

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gpipe import GPipe
from gpipe.stage.boundary import Boundary
from gpipe.stage.run import StageRun

NUM_LEARNING = 2  # mini-batches, from the first, that copy inputs and compare recomputes

Key = tuple[int, int]


class Held(NamedTuple):
    """Something that a stage holds, as long as `tensor` lives."""

    key: Key
    num_bytes: int
    tensor: weakref.ref[Tensor]


class HeldBytes:
    """Watches what each stage of a model holds, as long as it is entered.

    That is what a stage alone would hold on a device of its own: the tensors that it received, each
    as large as it is, and the storages that autograd holds for it, each once and as large as it is,
    unless it is that of something received. Unlike `tests.live_bytes` it does not mind layers that
    save the input or the output of their stage, or write into its input: it asks not whether a
    storage lives, but whether the graph of this stage still refers to it.

    Args:
        model: The model.
        given: What the caller holds and a stage may save slices of, such as targets.

    Attributes:
        peak: The most bytes that each stage held at once.
    """

    def __init__(self, model: GPipe, given: list[Tensor]) -> None:
        self.peak = [0] * len(model.stages)
        tensors = (*model.parameters(), *model.buffers())
        self._not_counted = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        self._received: list[list[Held]] = [[] for _ in model.stages]
        self._saved: list[list[Held]] = [[] for _ in model.stages]
        self._here = threading.local()  # the stage whose action runs
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        forward, recompute, see = StageRun.forward, StageRun.recompute, self._see_received

        def seen(run: StageRun, microbatch: int, inputs: Boundary) -> Boundary | None:
            see(run.stage.index, inputs.tensors)
            return forward(run, microbatch, inputs)

        def repeated(run: StageRun, microbatch: int, nothing: None = None) -> None:
            self._here.stage = run.stage.index
            recompute(run, microbatch, nothing)

        self._exit.enter_context(mock.patch.object(StageRun, "forward", seen))
        self._exit.enter_context(mock.patch.object(StageRun, "recompute", repeated))
        self._exit.enter_context(saved_tensors_hooks(self._see_saved, lambda tensor: tensor))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _see_received(self, stage: int, tensors: list[Tensor]) -> None:
        self._here.stage = stage
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata, 0
            self._received[stage].append(Held(key, tensor.nbytes, weakref.ref(tensor)))
        self._note_peak(stage)

    def _see_saved(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved = tensor.detach()  # lives as long as the graph holds it
        if storage._cdata not in self._not_counted:
            key, num_bytes = (storage._cdata, 0), storage.nbytes()
            if storage._cdata in self._given:
                key, num_bytes = (storage._cdata, tensor.storage_offset()), tensor.nbytes
            self._saved[self._here.stage].append(Held(key, num_bytes, weakref.ref(saved)))
            self._note_peak(self._here.stage)
        return saved

    def _note_peak(self, stage: int) -> None:
        received = self._received[stage] = _alive(self._received[stage])
        saved = self._saved[stage] = _alive(self._saved[stage])
        received_keys = {held.key for held in received}
        by_key = {held.key: held.num_bytes for held in saved if held.key not in received_keys}
        num_bytes = sum(held.num_bytes for held in received) + sum(by_key.values())
        self.peak[stage] = max(self.peak[stage], num_bytes)


def peak_bytes(model: GPipe, train: Callable[[], Any], given: list[Tensor]) -> list[int]:
    """What each stage holds at most while a mini-batch is trained on."""
    for _ in range(NUM_LEARNING):
        train()
    with HeldBytes(model, given) as held:
        train()
    return held.peak


def _alive(held: list[Held]) -> list[Held]:
    return [each for each in held if each.tensor() is not None]
