"""The file that `--profile` names."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpipe.costs import LayerCosts
from gpipe.errors import ConfigError

__all__ = ["load_profile", "save_profile"]

MOST = 1e30  # of seconds, bytes or operations: sums and products of such numbers stay finite
REMEDY = "Name another file, and the model is profiled."


def load_profile(path: Path) -> LayerCosts | None:
    """The costs in a file; None where there is none.

    Raises:
        ConfigError: It cannot be read, or holds what costs cannot be.
    """
    with _readable(path):
        if not path.exists():
            return None
        content = path.read_bytes()
    _require_sensible(path, content)
    try:
        costs = LayerCosts.load(path)
        # What is of a wrong type deep inside shows when it is used.
        costs.stage_costs([costs.num_layers], costs.rows)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{path} holds costs that cannot be ({error}). {REMEDY}") from error
    return costs


def save_profile(path: Path, costs: LayerCosts) -> None:
    """Writes the costs.

    Raises:
        ConfigError: It cannot be written.
    """
    with _readable(path):
        costs.save(path)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # a name with a zero byte, too
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"The profile {_short(str(path))} cannot be read or written ({reason}). Name a file in "
            "a folder that exists."
        ) from error


def _require_sensible(path: Path, content: bytes) -> None:
    """Refuse numbers with which nothing can be computed, by their key."""
    try:
        fields = json.loads(content)
        found = next(_unbounded(fields["costs"], "costs"), None)
    except (ValueError, RecursionError, TypeError, KeyError, LookupError):
        return  # it is no profile at all, which loading it says
    if found is not None:
        key, number = found
        raise ConfigError(
            f"{path} has {_short(str(number))} at `{key}`, and numbers of costs are at most "
            f"{MOST:g}. {REMEDY}"
        )


def _unbounded(value: Any, key: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _unbounded(inner, f"{key}.{name}")
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _unbounded(inner, f"{key}[{place}]")
    elif isinstance(value, int | float) and not abs(value) <= MOST:  # also NaN
        yield key, value


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"
