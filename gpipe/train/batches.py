"""Mini-batches of a dataset, in an order that can be had again."""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

__all__ = ["Batch", "Rows", "in_order", "num_batches", "num_rows", "shuffled"]

Rows = Dataset[tuple[Tensor, ...]]


class Batch(NamedTuple):
    """One mini-batch."""

    input: Any
    target: Any
    num_rows: int


def shuffled(rows: Rows, batch_size: int, *, seed: int, epoch: int) -> Iterator[Batch]:
    """All rows once, the last mini-batch shorter if they do not divide.

    The order is a function of `seed` and `epoch` and of nothing else: not of what was drawn
    before, not of how the model is cut.
    """
    entropy = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(entropy[0]))
    return _batches(rows, batch_size, generator, shuffle=True)


def in_order(rows: Rows, batch_size: int) -> Iterator[Batch]:
    """All rows once, in the order of the dataset."""
    return _batches(rows, batch_size, torch.Generator(), shuffle=False)


def num_batches(rows: Rows, batch_size: int) -> int:
    """How many mini-batches an epoch has."""
    return -(-num_rows(rows) // batch_size)


def num_rows(rows: Rows) -> int:
    """How many rows a dataset has."""
    return len(cast(Any, rows))  # `Dataset` does not declare a length


def _batches(
    rows: Rows, batch_size: int, generator: torch.Generator, *, shuffle: bool
) -> Iterator[Batch]:
    # Without a generator of its own DataLoader draws from the global one, and an evaluation
    # would change the dropout masks of the next epoch.
    loader = DataLoader(rows, batch_size, shuffle=shuffle, generator=generator)
    left = num_rows(rows)
    for input, target in loader:
        yield Batch(input, target, min(batch_size, left))
        left -= batch_size
