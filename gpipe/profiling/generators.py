"""Generators of random numbers that hang on modules."""

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

__all__ = ["restorers"]


def restorers(values: Iterable[Any]) -> list[Callable[[], object]]:
    """What puts the generators among some values back into the state that they are in now."""
    return [restorer for value in values if (restorer := _restorer(value)) is not None]


def _restorer(value: Any) -> Callable[[], object] | None:
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    return None
