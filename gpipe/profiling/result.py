"""From what was found to the costs of layers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gpipe.costs import LayerCosts, LayerMemory
from gpipe.profiling.subject import Subject

__all__ = ["costs_of"]


def costs_of(
    subject: Subject, memory: LayerMemory, device: torch.device, **measured: Any
) -> LayerCosts:
    """The costs, with the bytes that do not depend on rows.

    Args:
        subject: The model and the rows.
        memory: What its layers do with memory.
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
        memory=memory,
        parameter_bytes=tuple(map(_num_bytes, parameters)),
        buffer_bytes=tuple(_num_bytes(layer.buffers()) for layer in subject.layers),
        gradient_bytes=tuple(map(_num_bytes, trained)),
        **measured,
    )


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
