"""How many layers each stage gets."""

from collections.abc import Sequence
from operator import index
from typing import SupportsIndex

from torch import nn

from gpipe.partition import balance_costs

__all__ = ["balance_by_parameters", "balance_costs", "require_balance"]


def balance_by_parameters(num_stages: int, module: nn.Sequential) -> list[int]:
    """Balance the bytes of parameters and buffers: the number of layers of each stage.

    Args:
        num_stages: How many stages there are to be, at most one per layer.
        module: The model; nothing in it is run or changed.

    Raises:
        PlanError: There are fewer layers than stages.
        ValueError: `num_stages` is below 1.
    """
    return balance_costs([_num_bytes(layer) for layer in module], num_stages)


def require_balance(balance: Sequence[int], num_layers: int) -> list[int]:
    """The balance as a list, when it fits the number of layers.

    Raises:
        TypeError: An entry is no whole number.
        ValueError: There is no entry, one is below 1, or the sum is not the number of layers.
    """
    if isinstance(balance, str) or not isinstance(balance, Sequence):
        raise TypeError(
            f"balance is {balance!r} of type {type(balance).__name__}. "
            "Pass a list with the number of layers of each stage, or the number of stages."
        )
    for stage, entry in enumerate(balance):
        if isinstance(entry, bool) or not isinstance(entry, SupportsIndex):
            raise TypeError(
                f"balance[{stage}] is {entry!r} of type {type(entry).__name__}. "
                "Give each stage a whole number of layers."
            )
        if index(entry) < 1:
            raise ValueError(f"balance[{stage}] is {entry}. Give each stage at least one layer.")
    balance = [index(entry) for entry in balance]
    if sum(balance) != num_layers:
        raise ValueError(
            f"balance is {balance}, which is {sum(balance)} layers, but the module has "
            f"{num_layers}. Let the entries add up to {num_layers}."
        )
    return balance


def _num_bytes(layer: nn.Module) -> int:
    tensors = [*layer.parameters(), *layer.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
