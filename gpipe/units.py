"""Numbers of bytes as people write them."""

__all__ = ["show_bytes"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def show_bytes(num_bytes: float) -> str:
    """A number of bytes in words, such as "1.5 GiB"; whole below 1 KiB."""
    number, unit = float(num_bytes), 0
    while abs(number) >= 1024 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.0f} B" if unit == 0 else f"{number:.1f} {_UNITS[unit]}"
