"""The 1,797 real 8x8 digits that come with scikit-learn."""

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from gpipe.data.splits import Splits
from gpipe.errors import ConfigError

__all__ = ["digits"]


def digits(test_fraction: float = 0.2, split_seed: int = 0) -> Splits:
    """Splits the digits at random, the same way for the same seed on every machine.

    Args:
        test_fraction: Share of the rows that is kept for testing, between 0 and 1.
        split_seed: Seed of the split alone; the caller's generator is not touched.

    Returns:
        Inputs float32 (rows, 64), scaled to 0…1; targets int64 (rows,), 0…9.

    Raises:
        ConfigError: scikit-learn is not installed.
        ValueError: One of the two parts would be empty, or an argument is no number.
    """
    inputs, targets = _load()
    num_test = _num_test(len(inputs), test_fraction)
    order = torch.randperm(len(inputs), generator=_split_generator(split_seed))
    test, train = order[:num_test], order[num_test:]
    return Splits(
        train=TensorDataset(inputs[train], targets[train]),
        test=TensorDataset(inputs[test], targets[test]),
    )


def _num_test(num_rows: int, test_fraction: object) -> int:
    if isinstance(test_fraction, float) and 0 < test_fraction < 1:
        num_test = round(num_rows * test_fraction)
        if 0 < num_test < num_rows:
            return num_test
    raise ValueError(
        f"test_fraction is {test_fraction!r}, which does not cut {num_rows} rows in two."
        " Give a number between 0 and 1, such as 0.2."
    )


def _split_generator(split_seed: object) -> torch.Generator:
    if type(split_seed) is not int or split_seed < 0:
        raise ValueError(f"split_seed is {split_seed!r}. Give a whole number, 0 or more.")
    return torch.Generator().manual_seed(split_seed)


def _load() -> tuple[Tensor, Tensor]:
    try:
        # Imported late: an extra that only this data needs, and slow to import.
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "The digits come with scikit-learn, which is not installed."
            ' Install it: pip install "gpipe[examples]"'
        ) from error
    images, targets = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets, dtype=torch.int64)
