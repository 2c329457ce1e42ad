"""Parameters that several layers share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from gpipe.costs.number import Numbers, require_number

__all__ = ["SharedParameter", "require_parts", "shared_parameter"]


class SharedParameter(NamedTuple):
    """A parameter that each of several layers counts as its own.

    Attributes:
        layers: Those that have it, in order; it lives with the first.
        parameter_bytes: Its size.
        gradient_bytes: That of its gradient, 0 where it is frozen.
    """

    layers: tuple[int, ...]
    parameter_bytes: float
    gradient_bytes: float


def shared_parameter(layers: Sequence[int], *sizes: Any) -> SharedParameter:
    """The same, however it was written down."""
    return SharedParameter(tuple(layers), *sizes)


def require_parts(
    shared: Sequence[SharedParameter], parameter_bytes: Numbers, gradient_bytes: Numbers
) -> None:
    """Refuse shared parameters that are no parts of what layers have.

    Raises:
        TypeError: A size is no number.
        ValueError: A layer is unknown, or shares more than it has.
    """
    for place, each in enumerate(shared):
        _require_layers(f"`shared[{place}]`", each.layers, len(parameter_bytes))
        require_number(f"shared[{place}].parameter_bytes", each.parameter_bytes)
        require_number(f"shared[{place}].gradient_bytes", each.gradient_bytes)
    _require_within(shared, "parameter_bytes", parameter_bytes)
    _require_within(shared, "gradient_bytes", gradient_bytes)


def _require_layers(name: str, layers: Sequence[int], num_layers: int) -> None:
    is_known = all(type(layer) is int and 0 <= layer < num_layers for layer in layers)
    if not is_known or len(layers) < 2 or list(layers) != sorted(set(layers)):
        raise ValueError(
            f"{name} is of layers {list(layers)}, and there are {num_layers}, counted from 0. Give "
            "at least two, each once and in order."
        )


def _require_within(shared: Sequence[SharedParameter], kind: str, numbers: Sequence[float]) -> None:
    for layer, whole in enumerate(numbers):
        part = sum(getattr(each, kind) for each in shared if layer in each.layers)
        if part > whole:
            raise ValueError(
                f"Layer {layer} shares {part} bytes, and `{kind}[{layer}]` is {whole}. Give a part "
                "of it."
            )
