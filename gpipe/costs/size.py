"""Bytes as a function of rows."""

from typing import NamedTuple

__all__ = ["BoundaryTensor", "Size", "Skip", "line_through"]


class Size(NamedTuple):
    """Bytes of a tensor or a storage: a fixed part, and a part for each row.

    Attributes:
        fixed_bytes: What is there whatever the rows, such as the mean that a norm saves.
        bytes_per_row: What each row adds.
    """

    fixed_bytes: float
    bytes_per_row: float

    def at(self, rows: int) -> float:
        """The bytes for this many rows."""
        return self.fixed_bytes + self.bytes_per_row * rows


class BoundaryTensor(NamedTuple):
    """A tensor that passes from one layer to the next, or skips.

    Attributes:
        storage: The number of the storage that it lies in; None where that is no activation, as
            in a layer that returns a parameter, a buffer or a constant.
        size: Of the tensor, which is what travels; its storage may be larger.
    """

    storage: int | None
    size: Size


class Skip(NamedTuple):
    """A tensor that jumps over layers.

    Attributes:
        name: As the layers call it.
        stash_layer: The layer that stashes it.
        pop_layer: The later layer that pops it.
        tensors: The tensor, or nothing where None was stashed.
    """

    name: str
    stash_layer: int
    pop_layer: int
    tensors: tuple[BoundaryTensor, ...]


def line_through(full: float, fewer: float, rows: int, fewer_rows: int) -> tuple[float, float]:
    """The fixed part and the part per row of what was measured with two numbers of rows.

    Neither part is negative, and with all rows the two give what was measured.

    Args:
        full: What was measured with all rows.
        fewer: What was measured with fewer of them.
        rows: How many are all.
        fewer_rows: How many are fewer; as many as all: everything is taken to grow with the rows.
    """
    proportional = full / rows
    if fewer_rows == rows:
        return 0.0, proportional
    per_row = min(max(0.0, (full - fewer) / (rows - fewer_rows)), proportional)
    return max(0.0, full - per_row * rows), per_row
