"""The processes that hold the same stages of different replicas."""

from collections.abc import Sequence
from typing import Literal

from torch import distributed as dist

from gpipe.arguments import require_choice, require_count
from gpipe.execution.reduction import LocalReduction, Reduction, SummedReduction
from gpipe.execution.sums import BackendSums, RingSums, Sums

__all__ = ["ALL_REDUCES", "BUCKET_BYTES", "AllReduce", "Replicas"]

AllReduce = Literal["backend", "ring", "none"]

ALL_REDUCES = "backend", "ring", "none"
BUCKET_BYTES = 25 * 2**20


class Replicas:
    """Sums gradients over replicas, while their pipelines drain.

    The sums are of what is added: for a mean, each replica weighs its gradients before. They are
    made in the dtype of the parameter (in its `grad_dtype`, where that is wider) and rounded to it
    at each addition, in bfloat16, too. All replicas get the same bits, and the same in every run.

    Gradients are packed into buckets. A bucket starts as soon as it is packed, so that what one
    stage has is summed while others still compute; the last bucket of a stage does not wait for the
    next stage. Gradients move into their buckets and out again one bucket at a time, so that it
    takes the memory of one more bucket, or of the largest parameter. Where this replica has no
    gradient for a parameter, the host waits in `finish` until it knows whether another one has.

    With one replica, or without a sum, gradients come back as they were added.

    Args:
        group: Those processes, this one among them; None: all. During a mini-batch nothing else may
            use it.
        all_reduce: "backend": by the collective of the group's backend; "ring": by
            `ring_all_reduce`; "none": no sum, each replica keeps its own gradients.
        bucket_bytes: The most that goes into one sum; a parameter that is larger goes alone.
        ring_order: The ranks of the group around the ring, as `order_by_host` gives; None:
            ascending.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `all_reduce` is unknown, `bucket_bytes` below 1, or this rank is not in `group`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        all_reduce: AllReduce = "backend",
        bucket_bytes: int = BUCKET_BYTES,
        ring_order: Sequence[int] | None = None,
    ) -> None:
        require_choice("all_reduce", all_reduce, ALL_REDUCES)
        self._bucket_bytes = require_count("bucket_bytes", bucket_bytes)
        self._sums: Sums | None = None
        if all_reduce != "none" and _num_ranks(group) > 1:
            is_ring = all_reduce == "ring"
            self._sums = RingSums(group, ring_order) if is_ring else BackendSums(group)

    def begin(self) -> Reduction:
        """The sum of one mini-batch, to be finished before the next one begins."""
        if self._sums is None:
            return LocalReduction()
        return SummedReduction(self._sums, self._bucket_bytes)

    def close(self) -> None:
        """End the thread of the ring, if there is one; a later sum starts it anew."""
        if self._sums is not None:
            self._sums.close()


def _num_ranks(group: dist.ProcessGroup | None) -> int:
    num_ranks = dist.get_world_size(group)
    if num_ranks < 1:
        raise ValueError(
            f"Rank {dist.get_rank()} is not in `group`. Make Replicas only on the ranks of the "
            "group."
        )
    return num_ranks
