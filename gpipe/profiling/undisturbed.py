"""Keeps what the process shares as it is."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from gpipe.stage.device import Device

__all__ = ["gradients_set_aside", "undisturbed"]


@contextmanager
def undisturbed(device: Device, num_threads: int | None = None) -> Iterator[None]:
    """Let layers run with grad, and put generators and the number of threads back afterwards.

    Args:
        device: Where they run.
        num_threads: How many threads an operation may use meanwhile; None: as many as now.
    """
    states = [(generator, generator.random_state()) for generator in device.generators]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    threads_before = torch.get_num_threads()
    try:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads_before)
        for generator, state in states:
            generator.set_random_state(state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def gradients_set_aside(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Let nothing that happens meanwhile be seen in `.grad`.

    Some backwards reach any leaf, such as those of reentrant checkpoints.
    """
    gradients = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
