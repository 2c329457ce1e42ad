"""The sum of all ranks' tensors, made in a ring."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from gpipe.execution.ring_transfer import Ring, reduce_in_ring

__all__ = ["ring_all_reduce"]


def ring_all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    order: Sequence[int] | None = None,
) -> None:
    """Put the sum of the tensors of all ranks into each of them, in place.

    Each rank sends only to the next one in the ring and receives only from the one before. Of N
    ranks each sends and receives 2 (N - 1) / N times the bytes of the tensor. All get the same
    bits; they depend on the order of the ring, since each chunk is summed once around it, rounded
    to the dtype at each step. Every rank of the group must call it, with equal shapes and dtypes;
    in one group only one such sum may be under way at a time. Autograd does not see it.

    Besides the tensor it takes buffers for a chunk (an N-th of the tensor), at most 8 MiB; one
    that is not contiguous is copied, too.

    Args:
        tensor: Dense, of any shape, strides and dtype that can be added; booleans become "any".
        group: A group of `torch.distributed` with this rank in it; None: all ranks.
        order: The ranks of the group from left to right in the ring, the same on every rank, such
            as `order_by_host` gives; None: ascending.

    Raises:
        TypeError: `tensor` is no tensor, `group` no group, or `order` no sequence.
        ValueError: `tensor` is not dense, or several of its elements are one in memory; there is no
            process group, or this rank is not in `group`; `order` has not every rank once.
    """
    _require_dense(tensor)
    ring = _ring(_require_group(group), order)
    if len(ring.order) == 1:
        return
    target = tensor.detach()
    laid_out = _laid_out(target)
    numbers = torch.view_as_real(laid_out) if laid_out.is_complex() else laid_out
    reduce_in_ring(numbers.view(-1), ring)
    if laid_out is not target:
        target.copy_(laid_out)


def _laid_out(tensor: Tensor) -> Tensor:
    """The same numbers in one line of memory; itself where they lie so."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()


def _require_dense(tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"`tensor` is {tensor!r}, of type {type(tensor).__name__}. Pass a torch.Tensor."
        )
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"`tensor` is not dense, its layout is {tensor.layout}. Pass tensor.to_dense()."
        )
    if tensor.is_contiguous():
        return
    shape, strides = tuple(tensor.shape), tensor.stride()
    if any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)):
        raise ValueError(
            f"`tensor` of shape {shape} has strides {strides}: several of its elements are one in "
            "memory. Pass tensor.contiguous()."
        )


def _require_group(group: object) -> dist.ProcessGroup:
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        rank = dist.get_rank()
        raise ValueError(
            f"Rank {rank} is not in `group`. Call this only on the ranks of the group."
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"`group` is {group!r}, of type {type(group).__name__}. Pass what "
            "torch.distributed.new_group has returned, or None for all ranks."
        )
    if not dist.is_initialized():
        raise ValueError(
            "There is no process group. Call torch.distributed.init_process_group first."
        )
    everyone = group or dist.group.WORLD
    assert everyone is not None
    return everyone


def _ring(group: dist.ProcessGroup, order: Sequence[int] | None) -> Ring:
    num_ranks, rank = group.size(), group.rank()
    if order is None:
        return Ring(group, range(num_ranks), rank)
    if not isinstance(order, Sequence):
        raise TypeError(
            f"`order` is {order!r}, of type {type(order).__name__}. Pass a list of ranks."
        )
    if len(order) != num_ranks or set(order) != set(range(num_ranks)):
        raise ValueError(
            f"`order` is {order!r}, in a group of {num_ranks}. Pass every rank of the group from 0 "
            f"to {num_ranks - 1} once."
        )
    return Ring(group, order, order.index(rank))
