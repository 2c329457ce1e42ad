"""A model looked at without its values."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from gpipe.train.build import sequential
from gpipe.train.factory import Factory
from gpipe.train.mistake import RunFileError

__all__ = ["look_at"]

META = torch.device("meta")
T = TypeVar("T")


def look_at(model_factory: Factory, look: Callable[[nn.Sequential], T]) -> T:
    """What a look at the model says.

    It is on the meta device, and nothing is allocated; where it or the look needs values, a real
    one is made.
    """
    try:
        with META:
            module = sequential(model_factory)
        return look(module)
    except RunFileError:
        raise
    except Exception:  # noqa: BLE001 - what is wrong with the model itself shows again
        return look(sequential(model_factory))
