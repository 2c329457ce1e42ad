"""Any text file, as bytes to be predicted one by one."""

from os import PathLike
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from gpipe.arguments import require_count
from gpipe.data.splits import Splits
from gpipe.errors import ConfigError

__all__ = ["text"]


def text(
    path: str, num_tokens: int = 64, stride: int | None = None, test_fraction: float = 0.1
) -> Splits:
    """Cuts a file into windows; the target of each byte is the next one.

    Args:
        path: The file; each of its bytes is a token, 0 to 255.
        num_tokens: The length of a window.
        stride: From the start of a window to that of the next; None: its length.
        test_fraction: Share of the file, at its end, that is kept for testing.

    Returns:
        Inputs and targets int64 (rows, num_tokens).

    Raises:
        ConfigError: The file cannot be read.
        TypeError: An argument has the wrong type.
        ValueError: It is too short for a window in either part, or a number cannot be.
    """
    num_tokens = require_count("num_tokens", num_tokens)
    stride = num_tokens if stride is None else require_count("stride", stride)
    if isinstance(test_fraction, bool) or not isinstance(test_fraction, int | float):
        raise TypeError(f"test_fraction is {test_fraction!r}. Give a number between 0 and 1.")
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction is {test_fraction}. Give a number between 0 and 1.")
    tokens = _read(path)
    num_train = len(tokens) - round(len(tokens) * test_fraction)
    parts = tokens[:num_train], tokens[num_train:]
    shortest = min(map(len, parts))
    if shortest <= num_tokens:
        raise ValueError(
            f"{path} has {len(tokens)} bytes, of which the smaller part has {shortest}: too few "
            f"for a window of {num_tokens} and the byte behind it. Use a longer file or fewer "
            "tokens."
        )
    # From beyond the end no window starts, wherever that is; torch takes no number of any length.
    stride = min(stride, len(tokens))
    train, test = (_windows(part, num_tokens, stride) for part in parts)
    return Splits(train=train, test=test)


def _read(path: str) -> Tensor:
    if not isinstance(path, str | PathLike):
        raise TypeError(f"path is {path!r}. Name a file, from the folder that gpipe is started in.")
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # a name with a zero byte, too
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{path} cannot be read ({reason}). Name a file, from the folder that gpipe is started "
            "in."
        ) from error
    if not content:
        raise ValueError(f"{path} is empty. Use a longer file.")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def _windows(tokens: Tensor, num_tokens: int, stride: int) -> TensorDataset:
    windows = tokens.unfold(0, num_tokens + 1, stride)
    return TensorDataset(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
