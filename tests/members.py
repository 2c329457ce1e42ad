"""All members over which a law is tested, and what a test compares."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

SCHEDULES = ("fill_drain", "1f1b")
CHECKPOINT_MODES = ("never", "except_last", "always")
FACES = ("backward", "step")

# `model(x)` is fill-drain whatever the schedule.
WAYS = [
    (face, schedule, checkpoint)
    for face, schedule, checkpoint in product(FACES, SCHEDULES, CHECKPOINT_MODES)
    if face == "step" or schedule == "fill_drain"
]
over_all_ways = pytest.mark.parametrize(("face", "schedule", "checkpoint"), WAYS)


def mlp(num_layers: int = 7, width: int = 6) -> nn.Sequential:
    """Alternating Linear and Tanh, from a fixed start."""
    torch.manual_seed(0)
    pair = (lambda: nn.Linear(width, width), nn.Tanh)
    return nn.Sequential(*(pair[i % 2]() for i in range(num_layers)))


def train_once(
    model: GPipe, face: str, x: object, y: object, loss_fn: Callable[..., Tensor]
) -> Tensor:
    """One forward and backward through either face; the loss."""
    if face == "step":
        return model.step(x, y, loss_fn).loss
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss.detach()


def take_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """The gradients by name, removed from the module."""
    taken = {
        name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()
    }
    module.zero_grad()
    return taken


def relative_difference(a: Tensor, b: Tensor) -> float:
    """The largest difference over the largest value."""
    scale = max(a.abs().max().item(), b.abs().max().item(), 1e-300)
    return (a - b).abs().max().item() / scale


@contextmanager
def intra_op_threads(num_threads: int) -> Iterator[None]:
    """Bits depend on how many threads share an operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
