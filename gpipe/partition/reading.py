"""Numbers as callers pass them, checked and made whole."""

from collections.abc import Iterable
from fractions import Fraction
from math import gcd, isfinite, lcm
from numbers import Rational, Real
from operator import index
from typing import SupportsIndex

__all__ = ["read_cuts", "read_limits", "read_numbers", "require_one_per", "whole"]


def read_numbers(name: str, values: object, each: str) -> list[Fraction]:
    """Returns the numbers of the layers, or of the stages, exactly as they are.

    Args:
        name: The argument, as the caller wrote it.
        values: What was passed.
        each: What has a number: "layer" or "stage".

    Raises:
        TypeError: `values` is no collection, or one of them no real number.
        ValueError: A number is negative, infinite or NaN.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        found = type(values).__name__
        raise TypeError(f"`{name}` is {values!r}, of type {found}. Pass one number per {each}.")
    return [_read(f"{name}[{number}]", value) for number, value in enumerate(values)]


def read_limits(name: str, values: object, num_stages: int) -> list[Fraction]:
    """Returns one limit per stage, from a number for each or from one for all.

    Raises:
        TypeError: `values` is neither a real number nor a collection of such.
        ValueError: A number is negative, infinite or NaN, or there is not one per stage.
    """
    if isinstance(values, Real):
        return [_read(name, values)] * num_stages
    limits = read_numbers(name, values, "stage")
    require_one_per("stage", name, limits, num_stages)
    return limits


def read_cuts(cuts: object, num_layers: int) -> list[int]:
    """Returns the layers before which a stage must begin, ascending.

    Raises:
        TypeError: `cuts` is no collection, or an entry no whole number.
        ValueError: There is no such layer, or none before it.
    """
    if isinstance(cuts, str) or not isinstance(cuts, Iterable):
        found = type(cuts).__name__
        raise TypeError(f"`cuts` is {cuts!r}, of type {found}. Pass indices of layers.")
    entries = list(cuts)
    for cut in entries:
        if isinstance(cut, bool) or not isinstance(cut, SupportsIndex):
            found = type(cut).__name__
            raise TypeError(f"`cuts` has {cut!r}, of type {found}. Pass indices of layers.")
        if not 0 < index(cut) < num_layers:
            raise ValueError(
                f"`cuts` has {cut}, for {num_layers} layers. Pass indices of layers behind the "
                f"first, up to {num_layers - 1}."
            )
    return sorted({index(cut) for cut in entries})


def require_one_per(each: str, name: str, values: list[Fraction], num_expected: int) -> None:
    """Checks that there are as many numbers as layers, or stages.

    Raises:
        ValueError: There are more or fewer.
    """
    if len(values) != num_expected:
        raise ValueError(
            f"`{name}` has {len(values)} number{'s' * (len(values) != 1)} for {num_expected} "
            f"{each}{'s' * (num_expected != 1)}. Pass one number per {each}."
        )


def _read(name: str, value: object) -> Fraction:
    if not isinstance(value, Real):
        found = type(value).__name__
        raise TypeError(f"`{name}` is {value!r}, of type {found}. Pass a real number.")
    is_finite = isinstance(value, Rational) or isfinite(value)  # integers can exceed every float
    if not is_finite or value < 0:
        raise ValueError(f"`{name}` is {value}. Pass a finite number of at least 0.")
    if isinstance(value, Rational):
        # Without int(), NumPy's integers would stay NumPy's inside the fraction and overflow.
        return Fraction(int(value.numerator), int(value.denominator))
    return Fraction(float(value))


def whole(numbers: list[Fraction]) -> tuple[list[int], Fraction]:
    """The numbers as multiples of their largest common unit, and that unit."""
    denominator = lcm(*{number.denominator for number in numbers})
    multiples = [number.numerator * (denominator // number.denominator) for number in numbers]
    divisor = gcd(*multiples) or 1  # all are 0
    return [multiple // divisor for multiple in multiples], Fraction(divisor, denominator)
