"""Stages on different devices: what crosses, and what they share."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from gpipe import GPipe
from tests.execution.one_device import DEVICE, register
from tests.members import WAYS, mlp, train_once

ROOT = Path(__file__).parents[2]
PLACES = (["cpu", DEVICE], [DEVICE, "cpu"], [DEVICE, DEVICE])


def test_stages_may_live_on_different_devices():
    # A backend is registered for good, so it has a process of its own.
    done = subprocess.run(
        [sys.executable, "-m", "tests.execution.test_two_devices"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


class Head(nn.Module):
    """Maps back by a weight that is another layer's, too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def tied() -> nn.Sequential:
    """The first and the last layer share a weight."""
    module = mlp(5).double()
    return nn.Sequential(*module, Head(module[0].weight))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def check(places: list[str], face: str, schedule: str, checkpoint: str) -> None:
    """Two steps of training and an evaluation, as on one device."""
    plain, module = tied(), tied()
    model = GPipe(
        module, [2, 4], chunks=2, devices=places, schedule=schedule, checkpoint=checkpoint
    )
    assert module[0].weight is module[5].weight
    assert [str(stage.device) for stage in model.stages] == places
    for seed in range(2):
        x, y = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(seed)).double()
        leaf, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss_fn(plain(leaf), y).backward()
        target = y if face == "step" else y.to(places[-1])
        train_once(model, face, mine, target, loss_fn)
        assert_close(mine.grad, leaf.grad)
        for trained, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert trained.grad.device == trained.device
            assert_close(trained.grad.cpu(), expected.grad)
        for optimized in (model, plain):
            torch.optim.SGD(optimized.parameters(), lr=0.1, foreach=False).step()
            optimized.zero_grad()
    with torch.no_grad():
        assert_close(model.eval()(x).cpu(), plain(x))


def main() -> None:
    register()
    for places, way in product(PLACES, WAYS):
        check(places, *way)


if __name__ == "__main__":
    main()
