"""Finds a model's sizes and operations from shapes alone."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from gpipe.costs import LayerCosts
from gpipe.profiling.likeness import likeness
from gpipe.profiling.place import place_of
from gpipe.profiling.result import costs_of
from gpipe.profiling.subject import LossFunction, Subject
from gpipe.profiling.undisturbed import undisturbed
from gpipe.profiling.walk import Place, Trial, Visit, Visitor, visitor, walk
from gpipe.stage.microbatch import Split

__all__ = ["profile_meta"]

Shape = torch.Size


def _attention(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    flops: int = sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
    return flops


def _attention_backward(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *_: object, **__: object
) -> int:
    shapes = gradient, query, key, value
    flops: int = sdpa_backward_flop_count(*shapes)  # type: ignore[no-untyped-call]
    return flops


# The counter knows the fused attention of accelerators, not that of the CPU.
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class Flops(NamedTuple):
    """Floating-point operations of one layer."""

    forward: int
    backward: int


def profile_meta(
    module: nn.Sequential,
    sample: Any,
    *,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    split: Split = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> LayerCosts:
    """Counts the memory and the floating-point operations of each layer without computing.

    Model and sample may be on the meta device, or anywhere: nothing is allocated, since only shapes
    go through the layers. They go through as on `device`, which matters: attention, for one, saves
    less where a device has one kernel for it. Layers of torch and gpipe that are equal and get
    equal shapes are looked at once.

    A layer that looks at values cannot be profiled so. Workspaces that an operation saves for its
    own backward, such as those of an LSTM on the CPU, are not seen.

    Args:
        module: The model.
        sample: Its input.
        target: What `loss_fn` takes besides the output.
        loss_fn: The loss, which then counts as a part of the last layer.
        split: Along which dimension tensors are cut, as `GPipe` takes it.
        device: Whose kernels are assumed; None: the first accelerator's, or the CPU's without any.
        progress: Whether a bar is shown.

    Returns:
        Costs whose times are 0.

    Raises:
        TypeError: `module` is no Sequential, or an argument has the wrong type.
        ValueError: Tensors disagree on the number of rows, or the device is not on this machine.
        BaseException: What a layer raised, with a note of which one it was.
    """
    subject = Subject(module, sample, target, loss_fn, split)
    place = place_of(device)

    def faked(tensor: Tensor) -> Tensor:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place.torch_device
        )

    with undisturbed(place), FakeTensorMode(allow_non_fake_inputs=True):
        memory, flops = walk(subject, faked, _once(visitor(faked, _flops)), progress)
    return costs_of(
        subject,
        memory,
        place.torch_device,
        forward_flops_per_row=tuple(each.forward / subject.rows[0] for each in flops),
        backward_flops_per_row=tuple(each.backward / subject.rows[0] for each in flops),
    )


def _flops(trials: Sequence[Trial]) -> Flops:
    full, _ = trials
    forward = _counted(full().forward)
    # The counter watches modules while it counts. Where one of them is given a parameter, as in a
    # parametrization, what it leaves there forbids the backward.
    attempt = full()
    attempt.forward()
    attempt.prepare_backward()
    return Flops(forward, _counted(attempt.backward))


def _counted(action: Callable[[], None]) -> int:
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        action()
    flops: int = counter.get_total_flops()
    return flops


def _once(visit: Visitor[Flops]) -> Visitor[Flops]:
    """Visits a layer only if none that is known to be like it was visited."""
    known: dict[Hashable, Visit[Flops]] = {}

    def visit_once(place: Place) -> Visit[Flops]:
        key = likeness(place)
        if key is None:
            return visit(place)
        if key not in known:
            known[key] = visit(place)
        return known[key]

    return visit_once
