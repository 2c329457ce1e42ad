"""How many layers each stage gets."""

import warnings
from collections.abc import Sequence
from itertools import chain
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import nn

from gpipe.arguments import require_count
from gpipe.costs import LayerCosts
from gpipe.partition import balance_costs
from gpipe.profiling import WorkspaceWarning, profile, profile_memory, profile_meta
from gpipe.stage.boundary import pack
from gpipe.stage.sequential import require_sequential

__all__ = [
    "balance_by_flops",
    "balance_by_memory",
    "balance_by_parameters",
    "balance_by_time",
    "balance_costs",
    "layer_bytes",
    "layer_flops",
    "require_balance",
]


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


def balance_by_time(
    num_stages: int,
    module: nn.Sequential,
    sample: Any,
    *,
    num_workers: int | None = None,
    **options: Any,
) -> list[int]:
    """Balance the measured seconds of forward and backward.

    Args:
        num_stages: How many stages there are to be, at most one per layer.
        module: The model; it is run, and nothing in it is changed.
        sample: Its input, best as many rows as a micro-batch will have.
        num_workers: How many workers share the stages; None: each stage has its own.
        options: Keywords of `gpipe.profiling.profile`, such as `time_budget_s`. On the CPU a layer
            has a worker's share of the threads, unless `num_threads` says otherwise.

    Raises:
        PlanError: There are fewer layers than stages.
        TypeError: `module` is no Sequential, or an argument has the wrong type.
        ValueError: An argument has a value that cannot be; the message says which can.
        BaseException: What a layer raised, with a note of which one it was.
    """
    _require_enough(num_stages, module)
    workers = num_stages if num_workers is None else require_count("num_workers", num_workers)
    share = {"num_threads": max(1, torch.get_num_threads() // workers)}
    return balance_costs(profile(module, sample, **share | options).times_s, num_stages)


def balance_by_memory(
    num_stages: int,
    module: nn.Sequential,
    sample: Any,
    *,
    optimizer_copies: float = 2.0,
    **options: Any,
) -> list[int]:
    """Balance the bytes of parameters, buffers, gradients, optimizer and saved activations.

    Args:
        num_stages: How many stages there are to be, at most one per layer.
        module: The model; each layer is run forward, and nothing is changed. On the meta device
            shapes alone go through it.
        sample: Its input, best as many rows as a stage will hold.
        optimizer_copies: How many numbers the optimizer keeps for each that is trained: 2 for
            AdamW, 1 for momentum, 0 for plain SGD.
        options: Keywords of `gpipe.profiling.profile_memory`, such as `device`.

    Raises:
        PlanError: There are fewer layers than stages.
        TypeError: `module` is no Sequential, or an argument has the wrong type.
        ValueError: An argument has a value that cannot be; the message says which can.
        BaseException: What a layer raised, with a note of which one it was.
    """
    _require_enough(num_stages, module)
    measure = profile_meta if _has_meta(module, sample) else profile_memory
    costs = measure(module, sample, **options)
    return balance_costs(layer_bytes(costs, optimizer_copies), num_stages)


def balance_by_flops(
    num_stages: int, module: nn.Sequential, sample: Any, **options: Any
) -> list[int]:
    """Balance the floating-point operations of forward and backward, without computing.

    Args:
        num_stages: How many stages there are to be, at most one per layer.
        module: The model, which may be on the meta device: shapes alone go through it.
        sample: Its input.
        options: Keywords of `gpipe.profiling.profile_meta`, such as `device`.

    Raises:
        PlanError: There are fewer layers than stages.
        TypeError: `module` is no Sequential, or an argument has the wrong type.
        ValueError: An argument has a value that cannot be; the message says which can.
        BaseException: What a layer raised, with a note of which one it was.
    """
    _require_enough(num_stages, module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkspaceWarning)  # memory is not asked for
        flops = layer_flops(profile_meta(module, sample, **options))
    assert flops is not None, "shapes tell the operations"
    return balance_costs(flops, num_stages)


def layer_bytes(costs: LayerCosts, optimizer_copies: float) -> list[float]:
    """What each layer needs: parameters, buffers, gradients, optimizer and saved activations.

    Copies of parameters that autocast keeps are among them.
    """
    per_layer = zip(
        costs.parameter_bytes,
        costs.buffer_bytes,
        costs.cast_bytes,
        [(1 + optimizer_copies) * number for number in costs.gradient_bytes],
        [size.at(costs.rows) for size in costs.memory.saved_sizes],
        strict=True,
    )
    return [sum(numbers) for numbers in per_layer]


def layer_flops(costs: LayerCosts) -> list[float] | None:
    """The operations of each layer for a row, forward and backward; None where not known."""
    forward, backward = costs.forward_flops_per_row, costs.backward_flops_per_row
    if forward is None or backward is None:
        return None
    return list(map(sum, zip(forward, backward, strict=True)))


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


def _require_enough(num_stages: int, module: nn.Sequential) -> None:
    """Refuse what cannot be balanced before anything is measured."""
    require_sequential(module)
    balance_costs([0] * len(module), num_stages)


def _has_meta(module: nn.Sequential, sample: Any) -> bool:
    tensors = chain(module.parameters(), module.buffers(), pack(sample).tensors)
    return any(tensor.is_meta for tensor in tensors)
