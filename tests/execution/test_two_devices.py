"""Stages on different devices: what crosses, and what they share."""

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from gpipe import GPipe
from tests.execution.one_device import DEVICE, register
from tests.layers import Head
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


class Again(torch.autograd.Function):
    """Runs a layer once more in its backward: on a device that has one, in the engine's thread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), gradient)
        return x.grad, None


class Checkpointed(nn.Module):
    """Does its own checkpointing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return Again.apply(x, self.layer)


def check_norm(face: str, schedule: str, checkpoint: str) -> None:
    """Each row counts once in running statistics, though the norm sees it twice."""
    norm = nn.BatchNorm1d(6, momentum=1.0)
    model = GPipe(
        nn.Sequential(nn.Linear(6, 6), Checkpointed(norm)), [1, 1], chunks=2, schedule=schedule,
        checkpoint=checkpoint, devices=[DEVICE, DEVICE], deferred_batch_norm=True,
    )  # fmt: skip
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    train_once(model, face, x, y if face == "step" else y.to(DEVICE), loss_fn)
    with torch.no_grad():
        between = model[0](x.to(DEVICE)).cpu()
    assert_close(norm.running_mean.cpu(), between.mean(0))
    assert_close(norm.running_var.cpu(), between.var(0))
    assert int(norm.num_batches_tracked) == 1


class CallsInBackward(torch.autograd.Function):
    """Calls a model in its backward, in the engine's thread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: nn.Module) -> Tensor:
        ctx.model = model
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.model(gradient)
        return gradient, None


class Calls(nn.Module):
    """Calls the model that it is a layer of, when its backward runs."""

    model: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return CallsInBackward.apply(x, vars(self)["model"])


def check_refusals() -> None:
    """What would wait for itself, in a thread of the engine, is told so: it hung."""
    devices = [DEVICE, DEVICE]
    model = GPipe(mlp(2), [1, 1], devices=devices)
    x = torch.randn(4, 6).to(DEVICE).requires_grad_()
    check_refusal(Again.apply(x, model))
    calls = Calls()
    model = GPipe(nn.Sequential(*mlp(2), calls), [1, 2], devices=devices)
    vars(calls)["model"] = model  # not a child of its own child
    check_refusal(model(x))


def check_refusal(output: Tensor) -> None:
    with pytest.raises(RuntimeError, match="has called the GPipe that runs it"):
        output.sum().backward()


def main() -> None:
    register()
    check_refusals()
    for places, way in product(PLACES, WAYS):
        check(places, *way)
    for way in WAYS:
        check_norm(*way)


if __name__ == "__main__":
    main()
