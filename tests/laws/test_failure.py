"""Law 6: a failed step leaves nothing behind."""

import pytest
import torch
from torch import nn

from gpipe import GPipe, is_recomputing
from gpipe.execution.caller_streams import CallerStreams
from tests.members import CHECKPOINT_MODES, FACES, SCHEDULES, mlp, take_gradients, train_once


class Boom(Exception):  # noqa: N818
    """The user's own."""


class Fails(nn.Module):
    """Fails in one action, as long as it is armed with an exception."""

    def __init__(self, action: str) -> None:
        super().__init__()
        self.action = action
        self.armed: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = "recompute" if is_recomputing() else "forward"
        if self.armed and self.action == now:
            raise self.armed
        return FailsBackward.apply(x, self)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.layer.armed and ctx.layer.action == "backward":
            raise ctx.layer.armed
        return gradient, None


@pytest.mark.parametrize(
    "error_class", [Boom, SystemExit, KeyboardInterrupt, MemoryError, StopIteration]
)
@pytest.mark.parametrize("action", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("face", FACES)
def test_an_exception_reaches_the_caller_as_itself(face, schedule, action, error_class):
    layer = Fails(action)
    module = nn.Sequential(*mlp(3), layer, *mlp(2))
    model = GPipe(module, [2, 2, 2], chunks=3, schedule=schedule, checkpoint="always")
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)

    layer.armed = error_class("stop")
    with pytest.raises(error_class) as caught:
        train_once(model, face, x, y, nn.MSELoss())
    assert caught.value is layer.armed
    note, *more = caught.value.__notes__
    assert len(more) == (error_class is MemoryError), "which gets a second one"
    assert note.startswith("gpipe: in stage 1, layer")
    assert note.endswith(
        f"micro-batch {2 if action != 'forward' and on_drain(face, schedule) else 0}, {action}"
    )
    assert any(entry.name in ("forward", "backward") for entry in caught.traceback)
    assert all(torch.equal(p.grad, torch.full_like(p, 7.0)) for p in model.parameters())

    layer.armed = None
    model.zero_grad()
    train_once(model, face, x, y, nn.MSELoss())
    gradients = take_gradients(model)
    nn.MSELoss()(module(x), y).backward()
    for name, plain in take_gradients(module).items():
        torch.testing.assert_close(gradients[name], plain)


def test_what_goes_wrong_afterwards_does_not_hide_the_failure(monkeypatch):
    def broken(_: object) -> None:
        raise RuntimeError("the device is in a bad state")

    layer = Fails("forward")
    model = GPipe(nn.Sequential(*mlp(2), layer), [1, 2], chunks=2)
    monkeypatch.setattr(CallerStreams, "join", broken)
    layer.armed = Boom("stop")
    with pytest.raises(Boom):
        model(torch.randn(4, 6))
    layer.armed = None
    with pytest.raises(RuntimeError, match="bad state"):
        model(torch.randn(4, 6))


def on_drain(face: str, schedule: str) -> bool:
    """Whether the first micro-batch that goes back is the last one."""
    return face == "backward" or schedule == "fill_drain"


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_failing_loss_is_named(schedule, checkpoint):
    def loss_fn(output, target):
        raise Boom

    model = GPipe(mlp(), 3, chunks=2, schedule=schedule, checkpoint=checkpoint)
    with pytest.raises(Boom) as caught:
        model.step(torch.randn(4, 6), torch.randn(4, 6), loss_fn)
    (note,) = caught.value.__notes__
    assert "in stage 2, the loss, micro-batch" in note
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_failing_layer_is_named_with_its_class():
    model = GPipe(mlp(), 3, chunks=2)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        model(torch.randn(4, 5))
    assert caught.value.__notes__ == [
        "gpipe: in stage 0, layer 0 ('0', Linear), micro-batch 0, forward"
    ]
