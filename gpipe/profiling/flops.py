"""Counts floating-point operations, those of fused kernels among them."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

__all__ = ["FORMULAS", "Count", "WorkspaceWarning", "counted"]

Shape = torch.Size


class WorkspaceWarning(UserWarning):
    """A layer saves more than shapes can tell."""


class Count(NamedTuple):
    """What was seen while something ran.

    Attributes:
        flops: Its floating-point operations.
        has_workspace: Whether a kernel was among them that saves a workspace of unknown size.
    """

    flops: int
    has_workspace: bool


def counted(action: Callable[[], None]) -> Count:
    """Run something, and count its operations."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        action()
    flops: int = counter.get_total_flops()
    kernels = counter.get_flop_counts().get("Global", {})
    return Count(flops, any(kernel in kernels for kernel in _WITH_WORKSPACE))


def _attention(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    flops: int = sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
    return flops


def _attention_backward(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *_: object, **__: object
) -> int:
    shapes = gradient, query, key, value
    flops: int = sdpa_backward_flop_count(*shapes)  # type: ignore[no-untyped-call]
    return flops


def _products(rows: Shape, weights: list[Shape]) -> int:
    """Those of all matrices among the weights with each row of each step."""
    return 2 * prod(rows[:-1]) * sum(prod(each) for each in weights if len(each) == 2)


def _onednn_rnn(input: Shape, weight: Shape, recurrent: Shape, *_: object, **__: object) -> int:
    return _products(input, [weight, recurrent])


def _onednn_rnn_backward(*arguments: Any, **keywords: Any) -> int:
    return 2 * _onednn_rnn(*arguments, **keywords)


def _fused_rnn(input: Shape, weights: list[Shape], *_: object, **__: object) -> int:
    # The input of a deeper layer is another than that of the first, but has as many rows.
    return _products(input, weights)


def _fused_rnn_backward(*arguments: Any, **keywords: Any) -> int:
    return 2 * _fused_rnn(*arguments, **keywords)


_aten = torch.ops.aten

# The counter knows the fused attention of accelerators, not that of the CPU, and no fused RNN; one
# that is not fused is made of products that it knows.
FORMULAS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten.mkldnn_rnn_layer: _onednn_rnn,
    _aten.mkldnn_rnn_layer_backward: _onednn_rnn_backward,
    _aten._cudnn_rnn: _fused_rnn,
    _aten._cudnn_rnn_backward: _fused_rnn_backward,
    _aten.miopen_rnn: _fused_rnn,
    _aten.miopen_rnn_backward: _fused_rnn_backward,
}

# Kernels that save something for their backward whose size only they know.
_WITH_WORKSPACE = (_aten.mkldnn_rnn_layer, _aten._cudnn_rnn, _aten.miopen_rnn)
