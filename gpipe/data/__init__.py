"""Data to start from: each factory returns `Splits`."""

from gpipe.data.digits import digits
from gpipe.data.splits import Splits

__all__ = ["Splits", "digits"]
