"""What replicas have to know of each other's part of a mini-batch."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from zlib import crc32

from gpipe.stage.stage import Stage

__all__ = ["Part", "frozen_sum", "require_alike"]


class Part(NamedTuple):
    """One replica's part, as one of its workers knows it.

    Attributes:
        rows: Those of its mini-batch; 0 where the worker does not know.
        num_microbatches: Into how many they are cut.
        frozen: A number for which parameters of the worker's stages are trained.
    """

    rows: int
    num_microbatches: int
    frozen: int


def frozen_sum(stages: Iterable[Stage]) -> int:
    """A number for which parameters are trained, the same in every process."""
    layers = (layer for stage in stages for layer in stage)
    flags = [parameter.requires_grad for layer in layers for parameter in layer.parameters()]
    return crc32(bytes(flags))


def require_alike(parts: Sequence[Part], worker: int, *, counts_alike: bool) -> None:
    """Refuse parts whose gradients cannot be brought together.

    Args:
        parts: Those of all replicas.
        worker: Which worker of each has told it.
        counts_alike: Whether all must have as many micro-batches.

    Raises:
        ValueError: Replicas train other parameters, or have other numbers of micro-batches where
            that is not possible; all of them raise it.
    """
    if len({part.frozen for part in parts}) > 1:
        raise ValueError(
            f"The replicas of worker {worker} do not train the same parameters. Let the same ones "
            "require grad on all ranks."
        )
    if counts_alike and len({part.num_microbatches for part in parts}) > 1:
        raise ValueError(
            f"The replicas have mini-batches of {[part.rows for part in parts]} rows, which make "
            f"{[part.num_microbatches for part in parts]} micro-batches; what `parallelize` has "
            "spread over them is put together for each. Give all replicas as many micro-batches."
        )
