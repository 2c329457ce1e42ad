"""Checks that costs are numbers that costs can be."""

from collections.abc import Sequence
from math import inf
from numbers import Real

__all__ = ["Numbers", "require_number", "require_numbers"]

Numbers = tuple[float, ...]


def require_numbers(name: str, numbers: Sequence[float], length: int, what: str) -> None:
    """Refuse anything but `length` finite numbers of at least 0.

    Args:
        name: The attribute that they are for.
        numbers: What was passed.
        length: How many there have to be.
        what: What there is one for each of.

    Raises:
        TypeError: Something that should be a number is none.
        ValueError: A number is negative or not finite, or there are too many or too few.
    """
    if len(numbers) != length:
        raise ValueError(
            f"`{name}` has {len(numbers)} numbers for {length} {what}. Give one for each."
        )
    for place, number in enumerate(numbers):
        require_number(f"{name}[{place}]", number)


def require_number(name: str, number: object) -> None:
    """Refuse anything but a finite number of at least 0.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative or not finite.
    """
    if not isinstance(number, Real) or isinstance(number, bool):
        found = type(number).__name__
        raise TypeError(f"`{name}` is {number!r}, of type {found}. Pass a real number.")
    if not 0 <= float(number) < inf:  # also refuses NaN
        raise ValueError(f"`{name}` is {number}. Pass a finite number of at least 0.")
