"""One mini-batch at a time through either face, and its gradients."""

import torch
from torch import Tensor, nn

from gpipe import GPipe
from tests.members import take_gradients, train_once


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 7, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, y


def piped(module: nn.Sequential, schedule: str = "1f1b", checkpoint: str = "always") -> GPipe:
    return GPipe(module, min(3, len(module)), 3, schedule=schedule, checkpoint=checkpoint)


def train(model: nn.Module, face: str, seed: int = 0) -> Tensor:
    dtype = next(model.parameters()).dtype
    return train_once(model, face, *batch(seed, dtype), nn.MSELoss())


def gradients_of(model: nn.Module, face: str, seed: int = 0) -> dict[str, Tensor | None]:
    train(model, face, seed)
    return take_gradients(model)


def assert_same_gradients(
    mine: dict[str, Tensor | None], other: dict[str, Tensor | None], limit: float = 1e-12
) -> None:
    assert mine.keys() == other.keys()
    for name, gradient in other.items():
        if gradient is None:
            assert mine[name] is None, name
        else:
            torch.testing.assert_close(mine[name], gradient, rtol=limit, atol=limit)
