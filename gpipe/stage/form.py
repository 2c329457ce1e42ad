"""What a payload looks like besides its numbers, so that another process can make its like."""

import copyreg
import io
import pickle
from collections import ChainMap
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gpipe.stage.boundary import (
    Boundary,
    Gradients,
    Payload,
    memory_like,
    same_structure,
    start_of,
)
from gpipe.stage.device import HOST, Device

__all__ = ["Form", "Landing", "Spec"]

# NCCL and gloo carry them as they are; the rest goes as bytes.
_CARRIED = {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32}

_MOST_LASTING_BYTES = 2**14  # of a form; many are kept, and what is no tensor may be large


class Spec(NamedTuple):
    """How one tensor lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_on_host: bool
    """Whether it lives there though its stage computes elsewhere, such as lengths."""
    is_carried_whole: bool
    """Whether its memory goes as it is, in torch's own order and with its dtype."""

    @classmethod
    def of(cls, tensor: Tensor, device: Device) -> "Spec":
        """That of a tensor which leaves a stage on this device.

        Raises:
            TypeError: It is not dense.
        """
        if not _is_plain_tensor(tensor):
            kind = tensor.layout if type(tensor) is Tensor else type(tensor).__name__
            raise TypeError(
                f"A tensor of shape {tuple(tensor.shape)} between two processes is not a plain "
                f"dense one but {kind}. Make it dense where the stage ends, such as by to_dense() "
                "or full_tensor()."
            )
        shape, strides, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        is_on_host = not device.has(tensor) and tensor.device == HOST
        is_whole = _is_plain(shape, strides) and dtype in _CARRIED and 0 not in shape
        return cls(shape, strides, dtype, tensor.requires_grad, is_on_host, is_whole)

    def describes(self, tensor: Tensor, device: Device) -> bool:
        """Whether it is that of this tensor."""
        return (
            _is_plain_tensor(tensor)
            and self.shape == tensor.shape
            and self.strides == tensor.stride()
            and self.dtype is tensor.dtype
            and self.requires_grad == tensor.requires_grad
            and self.is_on_host == (not device.has(tensor) and tensor.device == HOST)
        )

    def packed(self, tensor: Tensor) -> Tensor:
        """The numbers of a tensor that it describes in one line: its own memory, if they lie so."""
        if self.is_carried_whole and not (tensor.is_conj() or tensor.is_neg()):
            return tensor.detach() if self.requires_grad else tensor
        return _packed_apart(tensor)


class Form(NamedTuple):
    """How a payload looks.

    Attributes:
        structure: That of a boundary.
        specs: One for each tensor; None where there is no gradient.
        starts: How far behind an allocator's alignment each tensor starts, in elements.
        is_boundary: Or gradients.
        is_lasting: Whether the next one on this way may be compared with it, or is told anew.
    """

    structure: Any
    specs: tuple[Spec | None, ...]
    starts: tuple[int, ...]
    is_boundary: bool
    is_lasting: bool = False

    @classmethod
    def of(cls, payload: Payload, device: Device) -> "Form":
        """That of what leaves a stage on this device."""
        is_boundary = isinstance(payload, Boundary)
        tensors, structure = payload if isinstance(payload, Boundary) else (payload, None)
        specs = tuple([each if each is None else Spec.of(each, device) for each in tensors])
        starts = tuple([0 if each is None else start_of(each) for each in tensors])
        form = cls(structure, specs, starts, is_boundary)
        # What is no tensor may not even be equal to itself, such as a NaN.
        return form._replace(is_lasting=form.describes(payload, device))

    @classmethod
    def heard(cls, data: bytes) -> "Form":
        """That which another process has told."""
        form: Form = pickle.loads(data)
        return form._as_told(data)

    def told(self) -> tuple["Form", bytes]:
        """The form as both processes know it then, and what the other one is told."""
        written = io.BytesIO()
        _Pickler(written).dump(self)
        data = written.getvalue()
        return self._as_told(data), data

    def _as_told(self, data: bytes) -> "Form":
        return self if len(data) <= _MOST_LASTING_BYTES else self._replace(is_lasting=False)

    def describes(self, payload: Payload, device: Device) -> bool:
        """Whether a payload looks so, all that is no tensor included; starts may differ."""
        tensors, structure = payload if isinstance(payload, Boundary) else (payload, None)
        if len(self.specs) != len(tensors) or not same_structure(self.structure, structure):
            return False
        for spec, tensor in zip(self.specs, tensors, strict=True):
            if spec is None or tensor is None:
                if (spec is None) != (tensor is None):
                    return False
            elif not spec.describes(tensor, device):
                return False
        return True

    def filled(self, tensors: Gradients) -> Payload:
        """The payload with these tensors."""
        if self.is_boundary:
            return Boundary([tensor for tensor in tensors if tensor is not None], self.structure)
        return tensors


class _Pickler(pickle.Pickler):
    """Names the leaf of a structure: when it is made again, torch warns."""

    dispatch_table = ChainMap(  # noqa: RUF012 - pickle looks for it here
        {type(pytree.treespec_leaf()): lambda _: (pytree.treespec_leaf, ())},
        copyreg.dispatch_table,  # type: ignore[arg-type]
    )


class Landing:
    """Memory for a tensor that looks like this.

    Attributes:
        spec: How it looks.
        line: Where its numbers are to be put, as `packed` has laid them out.
    """

    def __init__(self, spec: Spec, start: int, device: torch.device) -> None:
        self.spec = spec
        self._loose: Tensor | None = None
        if start == 0 and spec.is_carried_whole:
            self.line = self._tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            return
        self._tensor = memory_like(spec.shape, spec.strides, start, spec.dtype, device)
        if _is_plain(spec.shape, spec.strides):
            self.line = _as_carried(self._tensor)
        elif _is_dense(spec.shape, spec.strides):
            self.line = _in_line(self._tensor).view(torch.uint8)
        else:
            shape = _distinct(spec.shape, spec.strides)
            self._loose = torch.empty(shape, dtype=spec.dtype, device=device)
            self.line = self._loose.view(-1).view(torch.uint8)

    def tensor(self) -> Tensor:
        """The tensor, once the bytes are there."""
        tensor, spec = self._tensor, self.spec
        if self._loose is not None:
            tensor.as_strided(self._loose.shape, spec.strides).copy_(self._loose)
        return tensor.requires_grad_() if spec.requires_grad else tensor


def _as_carried(tensor: Tensor) -> Tensor:
    # Views take time, and most need none.
    return tensor if tensor.dtype in _CARRIED else tensor.view(torch.uint8)


def _is_plain_tensor(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter)


@torch.no_grad()
def _packed_apart(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    shape, strides = tuple(plain.shape), plain.stride()
    if _is_plain(shape, strides):
        return _as_carried(plain)
    if not _is_dense(shape, strides):
        # What is one in memory is sent once.
        plain = plain.as_strided(_distinct(shape, strides), strides).contiguous()
    return _in_line(plain).view(torch.uint8)


def _in_line(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,))


@lru_cache(maxsize=4096)
def _is_plain(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a tensor lies as torch makes them: by far the most do, and need few steps."""
    return len(shape) > 0 and strides == torch.empty(shape, device="meta").stride()


@lru_cache(maxsize=4096)
def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill a stretch of memory without gaps, each once."""
    extent = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != extent:
                return False
            extent *= size
    return True


def _distinct(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what lies at different places in memory."""
    pairs = zip(shape, strides, strict=True)
    return tuple([min(size, 1) if stride == 0 else size for size, stride in pairs])
