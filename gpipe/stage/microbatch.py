"""Cuts a mini-batch into micro-batches, and joins their outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from gpipe.stage.boundary import Boundary, Gradients, pack

__all__ = ["Batch", "Split", "cut_gradients", "join", "num_rows", "slice_sizes"]

Split = Any
"""Along which dimension tensors are cut: an int, None for not at all, or a nesting of these."""


@dataclass(frozen=True)
class Batch:
    """A mini-batch's input or target, and how it is cut.

    Attributes:
        name: What errors call it.
        boundary: Its tensors and their structure.
        dims: The dimension along which each tensor is cut; None: every micro-batch gets the whole.
    """

    name: str
    boundary: Boundary
    dims: list[int | None]

    @classmethod
    def of(cls, name: str, value: Any, split: Split = 0) -> "Batch":
        """Take a value as users pass it.

        Raises:
            ValueError: `split` has another structure than the value.
            TypeError: `split` holds something that is no dimension.
        """
        boundary = pack(value)
        by_tensor: dict[int, int | None] = {}
        _assign_dims(split, value, name, by_tensor)
        return cls(name, boundary, [by_tensor[id(tensor)] for tensor in boundary.tensors])

    def slices(self, num_microbatches: int) -> list[Boundary]:
        """As even as possible; what is not cut, and what is no tensor, goes to each."""
        columns = [
            _pieces(tensor, dim, num_microbatches)
            for tensor, dim in zip(self.boundary.tensors, self.dims, strict=True)
        ]
        return [
            Boundary([column[microbatch] for column in columns], self.boundary.structure)
            for microbatch in range(num_microbatches)
        ]

    def join_gradients(self, gradients: Sequence[Gradients]) -> Gradients:
        """The gradient of each tensor from those of its slices; None where no slice has one."""
        columns = zip(*gradients, strict=True)
        parts = zip(columns, self.boundary.tensors, self.dims, strict=True)
        return [_join_gradients(column, tensor, dim) for column, tensor, dim in parts]


def num_rows(*batches: Batch) -> int:
    """The size on which all tensors agree in the dimension along which they are cut.

    Raises:
        ValueError: No tensor is cut, one has no such dimension, or two disagree.
    """
    first: tuple[str, int] | None = None
    for batch in batches:
        for index, (tensor, dim) in enumerate(zip(batch.boundary.tensors, batch.dims, strict=True)):
            if dim is None:
                continue
            label = f"tensor {index} of {batch.name}"
            rows = _size(tensor, dim, label)
            if first is not None and rows != first[1]:
                raise ValueError(
                    f"{first[0]} has {first[1]} rows and {label} has {rows}: they cannot be cut "
                    "into the same micro-batches. Give both one size, or say with `split` which "
                    "tensors are cut, and along which dimension (None: every micro-batch gets it)."
                )
            first = first or (label, rows)
    if first is None:
        raise ValueError("The input holds no tensor that is cut. Pass one with a row per example.")
    return first[1]


def slice_sizes(rows: int, num_microbatches: int) -> list[int]:
    """How many rows each micro-batch has, as even as possible, the larger ones first."""
    size, num_larger = divmod(rows, num_microbatches)
    return [size + (microbatch < num_larger) for microbatch in range(num_microbatches)]


def join(outputs: Sequence[Boundary], dim: int = 0) -> Boundary:
    """Join the outputs of all micro-batches; leaves as they are.

    Raises:
        ValueError: The outputs have different structures, or a tensor has no such dimension.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    for microbatch, output in enumerate(outputs):
        if not output.resembles(first):
            raise ValueError(
                f"The outputs of micro-batches 0 and {microbatch} differ in their structure, or in "
                f"what is no tensor: {first.structure} and {output.structure}. They cannot be "
                "joined: return tensors, nested alike for every micro-batch, or use step()."
            )
    columns = zip(*(output.tensors for output in outputs), strict=True)
    return Boundary([_join(column, dim) for column in columns], first.structure)


def cut_gradients(
    gradients: Gradients, sizes: Sequence[Sequence[int]], dim: int = 0
) -> list[Gradients]:
    """The gradients of a joined output, cut as its tensors were.

    Args:
        gradients: One for each tensor of the output, None where there is none.
        sizes: For each micro-batch the size of each tensor in the dimension.
        dim: The dimension along which they were joined.
    """
    if len(sizes) == 1:
        return [gradients]
    cut = [
        [None] * len(sizes) if gradient is None else torch.split(gradient, list(column), dim)
        for gradient, column in zip(gradients, zip(*sizes, strict=True), strict=True)
    ]
    return [list(pieces) for pieces in zip(*cut, strict=True)]


def _assign_dims(split: Split, value: Any, label: str, dims: dict[int, int | None]) -> None:
    """Find the dimension of each tensor; what stands for a part stands for all in it."""
    if isinstance(split, bool) or not isinstance(split, int | None | Mapping | Sequence):
        raise TypeError(f"`split` of {label} is {split!r}. Use a dimension, or None for the whole.")
    if isinstance(value, Tensor):
        if not isinstance(split, int | None):
            raise ValueError(
                f"`split` of {label} is {split!r}, but it is a tensor. Use a dimension."
            )
        dims.setdefault(id(value), split)
        return
    if isinstance(split, int | None):
        for tensor in pack(value).tensors:
            dims.setdefault(id(tensor), split)
        return
    parts = _parts(value)
    rules = dict(split) if isinstance(split, Mapping) else dict(enumerate(split))
    if rules.keys() != parts.keys():
        raise ValueError(
            f"`split` of {label} has the entries {list(rules)}, the value has {list(parts)}. "
            "Give one rule for each."
        )
    for key, part in parts.items():
        _assign_dims(rules[key], part, f"{label}[{key!r}]", dims)


def _parts(value: Any) -> dict[Any, Any]:
    """What a container holds, by key, field or position; nothing for what is no container."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return {}


def _size(tensor: Tensor, dim: int, label: str) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"{label} has {tensor.dim()} dimensions and cannot be cut along dimension {dim}. "
            "Pass a tensor with a row per example, a plain number, or None as its `split`."
        )
    return tensor.shape[dim]


def _pieces(tensor: Tensor, dim: int | None, num_microbatches: int) -> list[Tensor]:
    with torch.no_grad():
        if dim is None:
            pieces = [tensor.detach() for _ in range(num_microbatches)]
        else:
            sizes = slice_sizes(tensor.shape[dim], num_microbatches)
            pieces = list(torch.split(tensor, sizes, dim))
    return [piece.requires_grad_() for piece in pieces] if tensor.requires_grad else pieces


def _join(pieces: Sequence[Tensor], dim: int) -> Tensor:
    if pieces[0].dim() == 0:
        raise ValueError(
            "The output holds a tensor without dimensions in each micro-batch; these cannot be "
            "joined. Return one row per example, or use step() with a loss."
        )
    joined = torch.cat([piece.detach() for piece in pieces], dim)
    asks = any(piece.requires_grad for piece in pieces)
    return joined.requires_grad_() if asks else joined


def _join_gradients(
    pieces: Sequence[Tensor | None], whole: Tensor, dim: int | None
) -> Tensor | None:
    if all(piece is None for piece in pieces):
        return None
    if dim is None:
        present = [piece.to(whole.device) for piece in pieces if piece is not None]
        return torch.stack(present).sum(0) if len(present) > 1 else present[0]
    slices = whole.detach().tensor_split(len(pieces), dim)
    filled = [
        torch.zeros_like(part) if piece is None else piece.to(part.device)
        for piece, part in zip(pieces, slices, strict=True)
    ]
    return torch.cat(filled, dim) if len(filled) > 1 else filled[0]
