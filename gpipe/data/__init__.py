"""Data to start from: each factory returns `Splits`."""

from gpipe.data.digits import digits
from gpipe.data.splits import Splits
from gpipe.data.text import text

__all__ = ["Splits", "digits", "text"]
