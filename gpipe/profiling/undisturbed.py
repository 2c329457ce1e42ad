"""Keeps what the process shares as it is."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from gpipe.stage.device import Device

__all__ = ["undisturbed"]


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
