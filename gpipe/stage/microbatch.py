"""Cuts a mini-batch into micro-batches, and joins their outputs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpipe.stage.boundary import Boundary, Gradients

__all__ = ["cut_gradients", "gather", "join_gradients", "num_rows", "scatter", "slice_sizes"]


def num_rows(**values: Boundary) -> int:
    """The size along dimension 0 on which all tensors of all values agree.

    Args:
        values: Each value that is cut, by the name that an error gives it.

    Raises:
        ValueError: There is no tensor, one has no dimension, or two disagree.
    """
    first: tuple[str, int] | None = None
    for name, boundary in values.items():
        for index, tensor in enumerate(boundary.tensors):
            label = f"tensor {index} of {name}"
            if tensor.dim() == 0:
                raise ValueError(
                    f"{label} has no dimension and cannot be cut into micro-batches. "
                    "Pass a tensor with one row per example, or a plain number."
                )
            rows = tensor.shape[0]
            if first is not None and rows != first[1]:
                raise ValueError(
                    f"{first[0]} has {first[1]} rows and {label} has {rows}: they cannot be cut "
                    "into the same micro-batches. Give both the same size along dimension 0."
                )
            first = first or (label, rows)
    if first is None:
        raise ValueError("The input holds no tensor, so there is nothing to cut. Pass a tensor.")
    return first[1]


def slice_sizes(rows: int, num_microbatches: int) -> list[int]:
    """How many rows each micro-batch has, as even as possible, the larger ones first."""
    size, num_larger = divmod(rows, num_microbatches)
    return [size + (microbatch < num_larger) for microbatch in range(num_microbatches)]


def scatter(boundary: Boundary, num_microbatches: int) -> list[Boundary]:
    """Slices along dimension 0, as even as possible; what is no tensor goes to each."""
    with torch.no_grad():
        pieces = [tensor.tensor_split(num_microbatches) for tensor in boundary.tensors]
    asks = [tensor.requires_grad for tensor in boundary.tensors]
    return [
        Boundary(
            [_slice(piece[m], ask) for piece, ask in zip(pieces, asks, strict=True)],
            boundary.structure,
        )
        for m in range(num_microbatches)
    ]


def gather(outputs: Sequence[Boundary]) -> Boundary:
    """Join the outputs of all micro-batches along dimension 0, leaves as they are.

    Raises:
        ValueError: The outputs have different structures, or a tensor has no dimension 0.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    for m, output in enumerate(outputs):
        if output.structure != first.structure or len(output.tensors) != len(first.tensors):
            raise ValueError(
                f"The output of micro-batch {m} has another structure than that of micro-batch 0, "
                f"so they cannot be joined: {output.structure} and {first.structure}. "
                "Return tensors of the same nesting for every micro-batch."
            )
    columns = zip(*(output.tensors for output in outputs), strict=True)
    return Boundary([_join(column) for column in columns], first.structure)


def cut_gradients(gradients: Gradients, num_rows: Sequence[Sequence[int]]) -> list[Gradients]:
    """The gradients of a joined output, cut again.

    Args:
        gradients: One for each tensor of the output, None where there is none.
        num_rows: The rows of each tensor, for each micro-batch.
    """
    columns = zip(*num_rows, strict=True)
    cut = [
        [None] * len(num_rows) if gradient is None else torch.split(gradient, list(column))
        for gradient, column in zip(gradients, columns, strict=True)
    ]
    return [list(pieces) for pieces in zip(*cut, strict=True)]


def join_gradients(gradients: Sequence[Gradients], inputs: Boundary) -> Gradients:
    """The gradient of each input from those of its slices; None where no slice has one."""
    columns = zip(*gradients, strict=True)
    return [
        _join_gradients(column, tensor)
        for column, tensor in zip(columns, inputs.tensors, strict=True)
    ]


def _slice(piece: Tensor, asks: bool) -> Tensor:
    piece = piece.detach()
    return piece.requires_grad_() if asks else piece


def _join(pieces: Sequence[Tensor]) -> Tensor:
    if pieces[0].dim() == 0:
        raise ValueError(
            "The output holds a tensor without dimensions in each micro-batch; these cannot be "
            "joined. Return one row per example, or use step() with a loss."
        )
    joined = torch.cat([piece.detach() for piece in pieces])
    asks = any(piece.requires_grad for piece in pieces)
    return joined.requires_grad_() if asks else joined


def _join_gradients(pieces: Sequence[Tensor | None], whole: Tensor) -> Tensor | None:
    if all(piece is None for piece in pieces):
        return None
    slices = whole.tensor_split(len(pieces))
    return torch.cat(
        [
            torch.zeros_like(part) if piece is None else piece
            for piece, part in zip(pieces, slices, strict=True)
        ]
    )
