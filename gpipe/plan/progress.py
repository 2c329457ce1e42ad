"""The progress bar of a search."""

from tqdm import tqdm

__all__ = ["Bar"]


class Bar(tqdm):  # type: ignore[type-arg] # only its stubs are generic
    """How many ways have been looked at, on stderr where that is a terminal; gone at the end.

    How many there will be is known at the end only: the fastest come first, and what cannot be
    faster than those is left out.

    Args:
        is_shown: Whether there is anything to be seen.
    """

    monitor_interval = 0  # tqdm would start a thread that outlives the search

    def __init__(self, is_shown: bool) -> None:
        super().__init__(
            desc="search", unit=" ways", leave=False, disable=None if is_shown else True
        )
