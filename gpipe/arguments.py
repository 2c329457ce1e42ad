"""What callers may pass, and what they are told."""

from collections.abc import Collection
from difflib import get_close_matches
from operator import index
from typing import SupportsIndex

__all__ = ["require_choice", "require_count"]


def require_count(name: str, value: object) -> int:
    """Returns `value` as an int of at least 1.

    Args:
        name: The argument, as the caller wrote it.
        value: What was passed; NumPy integers are fine, booleans are not.

    Raises:
        TypeError: `value` is no whole number.
        ValueError: `value` is below 1.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        found = type(value).__name__
        raise TypeError(
            f"`{name}` is {value!r}, of type {found}. Pass a whole number of at least 1."
        )
    if index(value) < 1:
        raise ValueError(f"`{name}` is {value}. Pass a whole number of at least 1.")
    return index(value)


def require_choice(name: str, value: object, allowed: Collection[str]) -> str:
    """Returns `value`, one of the names in `allowed`.

    Args:
        name: The argument, as the caller wrote it.
        value: What was passed.
        allowed: The names to choose from, in the order of the message.

    Raises:
        TypeError: `value` is no string.
        ValueError: `value` is not allowed; the message has the allowed ones and the nearest.
    """
    choices = ", ".join(repr(choice) for choice in allowed)
    if not isinstance(value, str):
        found = type(value).__name__
        raise TypeError(f"`{name}` is {value!r}, of type {found}. Use one of {choices}.")
    if value not in allowed:
        raise ValueError(f"`{name}` is {value!r}. Use one of {choices}{_nearest(value, allowed)}.")
    return value


def _nearest(value: str, allowed: Collection[str]) -> str:
    matches = get_close_matches(value.lower(), allowed, n=1)
    return f" (nearest: {matches[0]!r})" if matches else ""
