"""Numbers of bytes as people write them."""

import re

__all__ = ["parse_bytes", "show_bytes"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")
_FACTORS: dict[str, float] = {
    **{unit.lower(): 1024**power for power, unit in enumerate(_UNITS)},
    **{unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL)},
}


def parse_bytes(text: str | float) -> float:
    """A number of bytes from words such as "16 GiB" or "10 GB/s", or from a plain number.

    Raises:
        ValueError: It says no number of bytes, or a negative or infinite one.
    """
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([A-Za-z]*)(?:/s)?\s*", str(text))
    number, unit = match.groups() if match else ("", "")
    try:
        num_bytes: float = float(number) * _FACTORS[unit.lower() or "b"]
    except (ValueError, KeyError):
        num_bytes = -1.0
    if not 0 <= num_bytes < float("inf"):
        raise ValueError(
            f"{text!r} is no number of bytes. Write a number, with a unit such as MiB or GB if "
            "it is not in bytes."
        )
    return num_bytes


def show_bytes(num_bytes: float) -> str:
    """A number of bytes in words, such as "1.5 GiB"; whole below 1 KiB."""
    number, unit = float(num_bytes), 0
    while abs(number) >= 1024 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.0f} B" if unit == 0 else f"{number:.1f} {_UNITS[unit]}"
