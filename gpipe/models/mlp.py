"""The multi-layer perceptron as an `nn.Sequential`."""

import itertools
from collections.abc import Callable, Sequence

from torch import nn

__all__ = ["mlp"]

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
}


def mlp(sizes: Sequence[int], activation: str = "relu", dropout: float = 0.0) -> nn.Sequential:
    """Builds Linear, activation, [Dropout,] …, Linear, each a layer of its own to be balanced.

    Args:
        sizes: Width of the input, of every hidden layer and of the output.
        activation: One of relu, tanh, gelu, silu, sigmoid.
        dropout: Probability of dropping a hidden unit; with 0.0 there are no Dropout layers.

    Returns:
        A model from (rows, sizes[0]) to (rows, sizes[-1]).

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument has a value that is not allowed.
    """
    _check_sizes(sizes)
    _check_activation(activation)
    _check_dropout(dropout)
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(num_inputs, num_outputs), _ACTIVATIONS[activation]()]
        if dropout > 0:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


def _check_sizes(sizes: object) -> None:
    if not isinstance(sizes, Sequence) or not all(type(size) is int for size in sizes):
        raise TypeError(f"sizes is {sizes!r}. Give a list of whole numbers such as [64, 256, 10].")
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(f"sizes is {sizes!r}. Give at least two widths, each 1 or more.")


def _check_activation(activation: object) -> None:
    if activation not in _ACTIVATIONS:
        names = ", ".join(_ACTIVATIONS)
        raise ValueError(f"activation is {activation!r}. Choose one of {names}.")


def _check_dropout(dropout: object) -> None:
    if not isinstance(dropout, int | float) or isinstance(dropout, bool):
        raise TypeError(f"dropout is {dropout!r}. Give a number from 0 up to, not including, 1.")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout!r}. Give a number from 0 up to, not including, 1.")
