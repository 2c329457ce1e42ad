"""Numbers and cuts in words."""

from collections.abc import Sequence

__all__ = ["count", "shown_balance"]

MOST_LISTED = 16  # stages whose layers are listed one by one


def count(number: int, one: str, several: str = "") -> str:
    """So many of something; `several` where an s is not enough."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def shown_balance(balance: Sequence[int]) -> str:
    """The layers of each stage, or from how many to how many there are."""
    if len(balance) <= MOST_LISTED:
        return str(list(balance))
    return f"of {min(balance)} to {max(balance)} layers"
