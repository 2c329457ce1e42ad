"""Finds a model's sizes and operations from shapes alone."""

import warnings
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from gpipe.costs import LayerCosts
from gpipe.profiling.flops import WorkspaceWarning, counted
from gpipe.profiling.likeness import likeness
from gpipe.profiling.place import place_of
from gpipe.profiling.result import costs_of
from gpipe.profiling.stand_in import attributes_of
from gpipe.profiling.subject import LossFunction, Subject
from gpipe.profiling.undisturbed import undisturbed
from gpipe.profiling.walk import Place, Trial, Visit, Visitor, visitor, walk
from gpipe.stage.microbatch import Split

__all__ = ["profile_meta"]


class _Flops(NamedTuple):
    """Floating-point operations of one layer."""

    forward: int
    backward: int
    has_workspace: bool


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

    A layer that looks at values cannot be profiled so. Of a sparse tensor no element is seen.
    Workspaces that a kernel saves for its own backward, such as that of an LSTM, are not seen
    either: where there is one, a `WorkspaceWarning` says so.

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

    with undisturbed(place), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        visit = visitor(place.torch_device.type, faked, _flops)
        seen = walk(subject, faked, _once(_remembering(mode, visit)), progress)
    _warn_of_workspaces(subject, seen.found)
    return costs_of(
        subject,
        seen,
        place.torch_device,
        forward_flops_per_row=tuple(each.forward / subject.rows[0] for each in seen.found),
        backward_flops_per_row=tuple(each.backward / subject.rows[0] for each in seen.found),
    )


def _flops(trials: Sequence[Trial]) -> _Flops:
    full, _ = trials
    forward = counted(full().forward)
    # The counter watches modules while it counts. Where one of them is given a parameter, as in a
    # parametrization, what it leaves there forbids the backward.
    attempt = full()
    attempt.forward()
    attempt.prepare_backward()
    return _Flops(forward.flops, counted(attempt.backward).flops, forward.has_workspace)


def _warn_of_workspaces(subject: Subject, found: Sequence[_Flops]) -> None:
    hidden = [subject.describe(index) for index, each in enumerate(found) if each.has_workspace]
    if hidden:
        warnings.warn(
            f"In {', '.join(hidden)} a kernel saves a workspace for its backward, whose size "
            "shapes do not tell: more memory is needed than is counted. Use profile_memory, which "
            "measures it.",
            WorkspaceWarning,
            stacklevel=3,
        )


def _remembering(mode: FakeTensorMode, visit: Visitor[_Flops]) -> Visitor[_Flops]:
    """Visits while each tensor that merely hangs on a layer has one image, whose views are views.

    The mode would make a new image at each use, and a view of it would look like an activation.
    """

    def visit_remembering(place: Place) -> Visit[_Flops]:
        images = [
            mode.from_tensor(value)
            for value in attributes_of(place.modules)
            if isinstance(value, Tensor) and not isinstance(value, Parameter)
        ]
        seen = visit(place)
        del images  # they had to live until now
        return seen

    return visit_remembering


def _once(visit: Visitor[_Flops]) -> Visitor[_Flops]:
    """Visits a layer only if none that is known to be like it was visited."""
    known: dict[Hashable, Visit[_Flops]] = {}

    def visit_once(place: Place) -> Visit[_Flops]:
        key = likeness(place)
        if key is None:
            return visit(place)
        if key not in known:
            known[key] = visit(place)
        return known[key]

    return visit_once
