"""The two autograd nodes between which a pipeline's backward runs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpipe.execution.caller_streams import ready_events
from gpipe.execution.hooks import keep_quiet
from gpipe.stage.boundary import Gradients
from gpipe.stage.device import HOST, Event
from gpipe.stage.roots import Root, differentiate

__all__ = ["Drain", "hand_over_to", "join"]

Drain = Callable[[Gradients, list[Event]], Gradients]
"""Runs the backwards: from the gradients of the outputs, and the moments when these are there, to
those of the leaves."""


class _Meeting:
    """What the two nodes of one mini-batch share."""

    def __init__(self, drain: Drain, leaves: Sequence[Tensor]) -> None:
        self.leaves = leaves
        self.drain: Drain | None = drain
        self.output_gradients: Gradients = []
        self.ready: list[Event] = []


class _Gate(Function):
    """Leaves in, a CPU token out; its backward runs the drain.

    The engine runs a node's backward on the thread of its gradients' device. This one waits there
    for workers, whose own backwards may need that device: if it saw tensors of an accelerator,
    nothing would ever move again. It sees the token only, so it runs on the thread that called
    `backward()`.
    """

    @staticmethod
    def forward(ctx: Any, meeting: _Meeting, *_: Tensor) -> Tensor:
        ctx.meeting = meeting
        return torch.zeros((), device=HOST)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise _refusal("create_graph=True through", "its backward makes no graph")
        meeting = ctx.meeting
        drain, meeting.drain = meeting.drain, None
        if drain is None:
            raise _refusal("A second backward through", "its activations were freed by the first")
        gradients, meeting.output_gradients = meeting.output_gradients, []
        by_leaf = drain(gradients, meeting.ready)
        for leaf, gradient in zip(meeting.leaves, by_leaf, strict=True):
            if gradient is None and leaf.is_leaf and leaf.requires_grad:
                keep_quiet(leaf)
        return (None, *by_leaf)


class _Emit(Function):
    """The token in, the outputs out; its backward keeps their gradients and passes a token on."""

    @staticmethod
    def forward(
        ctx: Any, meeting: _Meeting, outputs: Sequence[Tensor], _: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.meeting = meeting
        ctx.set_materialize_grads(False)
        emitted = tuple(output.detach() for output in outputs)
        pairs = zip(emitted, outputs, strict=True)
        ctx.mark_non_differentiable(*(to for to, output in pairs if not output.requires_grad))
        return emitted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, Tensor]:
        ctx.meeting.output_gradients = list(gradients)
        # The engine may run this on another thread and stream than the drain.
        ctx.meeting.ready = ready_events(gradients)
        return None, None, torch.zeros((), device=HOST)


def join(outputs: Sequence[Tensor], leaves: Sequence[Tensor], drain: Drain) -> list[Tensor]:
    """The outputs, made to depend on the leaves through one node.

    Args:
        outputs: What a pipeline computed, without a graph; those that require grad get one.
        leaves: The inputs and parameters that they depend on.
        drain: Called in the backward, on the thread that called it.
    """
    meeting = _Meeting(drain, leaves)
    token = _Gate.apply(meeting, *leaves)  # type: ignore[no-untyped-call]
    return list(_Emit.apply(meeting, outputs, token))  # type: ignore[no-untyped-call]


def hand_over_to(leaves: Sequence[Tensor]) -> Callable[[Gradients], None]:
    """What lets the engine bring each leaf its gradient: hooks fire and `.grad` is added to.

    It is called with one for each. The list is emptied: a gradient with a second owner is copied.

    Args:
        leaves: Tensors that require grad.
    """
    gradients: Gradients = []

    def give(_: Gradients, __: list[Event]) -> Gradients:
        given = gradients.copy()
        gradients.clear()
        return given

    token = _Gate.apply(_Meeting(give, leaves), *leaves)  # type: ignore[no-untyped-call]
    seed = torch.ones((), device=HOST)

    def hand_over(given: Gradients) -> None:
        gradients[:] = given
        given.clear()
        differentiate([Root(token, HOST)], [seed])

    return hand_over


def _refusal(what: str, why: str) -> RuntimeError:
    return RuntimeError(
        f"{what} the output of a GPipe is not possible: {why}. "
        "Add up what is to be differentiated and call backward() once."
    )
