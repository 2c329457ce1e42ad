"""What a data factory returns: rows to train and rows to test on."""

from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Splits"]


@dataclass(frozen=True)
class Splits:
    """Two map-style datasets whose rows are pairs (input, target).

    Attributes:
        train: The rows that are trained on; never empty.
        test: The rows that every evaluation looks at; never empty.
    """

    train: Dataset[tuple[Tensor, ...]]
    test: Dataset[tuple[Tensor, ...]]
