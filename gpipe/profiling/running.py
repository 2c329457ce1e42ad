"""Measures each layer of a model by running it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gpipe.arguments import require_count
from gpipe.costs import LayerCosts
from gpipe.profiling.place import computing_on, moving_to, place_of
from gpipe.profiling.result import costs_of
from gpipe.profiling.subject import LossFunction, Subject
from gpipe.profiling.timing import LayerTimes, Timing
from gpipe.profiling.undisturbed import undisturbed
from gpipe.profiling.walk import Trial, visitor, walk
from gpipe.stage.device import HOST
from gpipe.stage.microbatch import Split

__all__ = ["profile", "profile_memory"]


def profile(
    module: nn.Sequential,
    sample: Any,
    *,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    split: Split = None,
    device: torch.device | str | None = None,
    num_threads: int | None = None,
    time_budget_s: float = 10.0,
    progress: bool = False,
) -> LayerCosts:
    """Measures the time and memory of each layer, forward and backward.

    Layer after layer is run on what the one before gave, in the mode, training or not, that it is
    in. It computes with copies of its parameters and buffers, so that nothing changes: weights,
    buffers, `.grad`, training flags, generators; the same holds for the modules of a loss. Forward
    hooks of modules run as always. Nobody sees what a layer changes elsewhere: elements of other
    tensors, objects that hang on it and hold something in turn, global names, files.

    Each layer is warmed up before it is timed; the times are medians of repeats. A sample of at
    least 4 rows is measured with half of them, too, which tells what grows with the rows.

    Args:
        module: The model.
        sample: Its input, best as many rows as a micro-batch will have.
        target: What `loss_fn` takes besides the output.
        loss_fn: The loss: its time and memory then count as those of the last layer.
        split: Along which dimension tensors are cut, as `GPipe` takes it.
        device: Where to measure; None: the first accelerator, or the CPU without any.
        num_threads: How many threads an operation may use on the CPU; None: as many as now. A
            worker of a pipeline has its share of them only.
        time_budget_s: Seconds for the repeats of all layers together. At least one follows the
            warm-up of each layer, whatever the budget.
        progress: Whether a bar is shown.

    Returns:
        Costs whose floating-point operations are not known.

    Raises:
        TypeError: `module` is no Sequential, or an argument has the wrong type.
        ValueError: Tensors disagree on the number of rows, or one is on the meta device; or the
            device is not on this machine.
        BaseException: What a layer raised, with a note of which one it was.
    """
    subject = Subject(module, sample, target, loss_fn, split)
    subject.require_values()
    place = place_of(device)
    threads = torch.get_num_threads() if num_threads is None else num_threads
    with undisturbed(place, require_count("num_threads", threads)), computing_on(place):
        layer_bytes = _layer_bytes(module) if place.torch_device == HOST else []
        timing = Timing(len(module), subject.rows, place, time_budget_s, layer_bytes)
        moved = moving_to(place)
        visit = visitor(place.torch_device.type, moved, timing.measure)
        seen = walk(subject, moved, visit, progress)
    columns = zip(LayerTimes._fields, zip(*seen.found, strict=True), strict=True)
    return costs_of(subject, seen, place.torch_device, num_threads=threads, **dict(columns))


def profile_memory(
    module: nn.Sequential,
    sample: Any,
    *,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    split: Split = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> LayerCosts:
    """Measures the memory of each layer, by one forward of the sample and one of half of it.

    Nothing changes, as in `profile`, whose arguments these are.

    Returns:
        Costs whose times are 0 and whose floating-point operations are not known.

    Raises:
        TypeError: `module` is no Sequential, or an argument has the wrong type.
        ValueError: Tensors disagree on the number of rows, or one is on the meta device; or the
            device is not on this machine.
        BaseException: What a layer raised, with a note of which one it was.
    """
    subject = Subject(module, sample, target, loss_fn, split)
    subject.require_values()
    place = place_of(device)
    with undisturbed(place), computing_on(place):
        moved = moving_to(place)
        visit = visitor(place.torch_device.type, moved, _nothing)
        seen = walk(subject, moved, visit, progress)
    return costs_of(subject, seen, place.torch_device)


def _layer_bytes(module: nn.Sequential) -> list[int]:
    """The weights of each layer, and their gradients."""
    return [2 * sum(weight.nbytes for weight in layer.parameters()) for layer in module]


def _nothing(trials: Sequence[Trial]) -> None:
    """Measures no more than was seen anyway."""
