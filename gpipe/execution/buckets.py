"""Packs gradients into buckets, each of which is summed as one tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from gpipe.execution.local_parts import local_gradient, local_part, whole_gradient
from gpipe.stage.boundary import Gradients
from gpipe.stage.device import device_of

__all__ = ["Bucket", "sum_dtype", "unite"]


class Bucket:
    """The gradients of some parameters in one piece of memory.

    Elements stand there in the order of their indices: strides may differ between replicas.

    Args:
        parameters: Of one dtype and device.
        gradients: One for each, dense; zeros stand for None. The list is emptied, and each is let
            go when it is packed.

    Attributes:
        memory: What is to be summed in place.
    """

    def __init__(self, parameters: Sequence[Parameter], gradients: Gradients) -> None:
        self._parameters = parameters
        parts = [local_part(parameter) for parameter in parameters]
        dtype, device = sum_dtype(parameters[0]), parts[0].device
        if len(parts) == 1:
            self.memory = torch.empty(parts[0].shape, dtype=dtype, device=device)
            self._pieces: list[Tensor] = [self.memory]
        else:
            sizes = [part.numel() for part in parts]
            self.memory = torch.empty(sum(sizes), dtype=dtype, device=device)
            pieces = zip(torch.split(self.memory, sizes), parts, strict=True)
            self._pieces = [piece.view(part.shape) for piece, part in pieces]
        gradients.reverse()  # the first is the last, so that popping lets go of it
        self._layouts = [
            _pack(piece, gradients.pop(), parameter)
            for piece, parameter in zip(self._pieces, parameters, strict=True)
        ]

    def unpack(self) -> list[Tensor]:
        """The sums, each laid out as the gradient was (None: as the parameter is).

        A gradient with a bucket to itself is that memory. Others are copied: as views, one of them
        would keep, and be saved with, all the others, and their alignment would depend on the cut.
        """
        device = device_of(self.memory.device)
        device.retain(self.memory, device.current_stream())
        is_own = len(self._pieces) == 1
        sums = zip(self._pieces, self._layouts, self._parameters, strict=True)
        return [
            whole_gradient(_laid_out(piece, layout, is_own=is_own), parameter)
            for piece, layout, parameter in sums
        ]


def unite(parameters: Sequence[Parameter], bucket_bytes: int) -> list[list[int]]:
    """The places of the parameters of each bucket; those of a bucket have one dtype and device.

    All depends on the parameters alone, so that it is the same on all replicas. A parameter of more
    than `bucket_bytes` has a bucket to itself.
    """
    full: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for place, parameter in enumerate(parameters):
        part, dtype = local_part(parameter), sum_dtype(parameter)
        num_bytes = part.numel() * dtype.itemsize
        if num_bytes > bucket_bytes:
            full.append([place])
            continue
        places, total_bytes = open_buckets.get((dtype, part.device), ([], 0))
        if total_bytes + num_bytes > bucket_bytes:
            full.append(places)
            places, total_bytes = [], 0
        open_buckets[dtype, part.device] = [*places, place], total_bytes + num_bytes
    return full + [places for places, _ in open_buckets.values()]


def sum_dtype(parameter: Parameter) -> torch.dtype:
    """That in which its gradients are summed, also where this replica has none."""
    return torch.promote_types(parameter.dtype, parameter.grad_dtype or parameter.dtype)


def _pack(piece: Tensor, gradient: Tensor | None, parameter: Parameter) -> Tensor:
    """Fill the piece, and return the layout of the gradient: it, without its memory."""
    if gradient is None:
        piece.zero_()
        layout = torch.empty_like(local_part(parameter), device="meta")
        return layout.to(parameter.grad_dtype or parameter.dtype)
    part = local_gradient(gradient, parameter)
    piece.copy_(part)
    return torch.empty_like(part, device="meta")  # dense, also where `part` is not


def _laid_out(piece: Tensor, layout: Tensor, *, is_own: bool) -> Tensor:
    if is_own and layout.is_contiguous() and layout.dtype == piece.dtype:
        return piece
    return torch.empty_like(layout, device=piece.device).copy_(piece)
