"""From what was found to the costs of layers."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gpipe.costs import LayerCosts, SharedParameter
from gpipe.profiling.subject import Subject
from gpipe.profiling.walk import Walk

__all__ = ["costs_of"]


def costs_of(
    subject: Subject, seen: Walk[Any], device: torch.device, **measured: Any
) -> LayerCosts:
    """The costs, with the bytes that do not depend on rows.

    Args:
        subject: The model and the rows.
        seen: What its layers do with memory.
        device: Where that was found.
        measured: Further attributes of the costs.
    """
    parameters = [list(layer.parameters()) for layer in subject.layers]
    trained = [[each for each in found if each.requires_grad] for found in parameters]
    return LayerCosts(
        names=tuple(subject.names),
        rows=subject.rows[0],
        dtype=str(subject.dtype).removeprefix("torch."),
        device=str(device),
        memory=seen.memory,
        parameter_bytes=tuple(map(_num_bytes, parameters)),
        buffer_bytes=tuple(_num_bytes(layer.buffers()) for layer in subject.layers),
        gradient_bytes=tuple(map(_num_bytes, trained)),
        cast_bytes=tuple(seen.cast_bytes),
        shared=_shared(subject.layers),
        **measured,
    )


def _shared(layers: Sequence[nn.Module]) -> tuple[SharedParameter, ...]:
    owners: dict[Parameter, list[int]] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            owners.setdefault(parameter, []).append(index)
    return tuple(
        SharedParameter(tuple(having), each.nbytes, each.nbytes if each.requires_grad else 0)
        for each, having in owners.items()
        if len(having) > 1
    )


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
