"""Layers whose parameters FSDP2 keeps in parts, and reduces the gradients of."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn import Parameter

__all__ = [
    "fully_sharded",
    "reduce_next",
    "require_same_layers",
    "sharded_parameters",
    "sum_gradients",
]


def fully_sharded(layers: Iterable[nn.Module]) -> list[Any]:
    """The modules in these layers that `fully_shard` was called with."""
    modules = (module for layer in layers for module in layer.modules())
    # By name: the import takes long, and whoever has made one has done it.
    return [
        each for each in modules if "FSDPModule" in [base.__name__ for base in type(each).__mro__]
    ]


def sharded_parameters(layer: nn.Module) -> set[Parameter]:
    """Those that live in parts, while no forward or backward runs."""
    return {parameter for module in fully_sharded([layer]) for parameter in module.parameters()}


def require_same_layers(stage: nn.Module, given: nn.Sequential) -> list[nn.Module]:
    """The layers that `parallelize` has given back for a stage.

    Raises:
        TypeError: It gave back no stage.
        ValueError: The stage has other layers, or is sharded as a whole.
    """
    if not isinstance(stage, nn.Sequential):
        raise TypeError(
            f"parallelize returned a {type(stage).__name__}. Return the stage that it was given, "
            "with its layers spread over the mesh."
        )
    if fully_sharded([stage])[:1] == [stage]:
        raise ValueError(
            "parallelize called fully_shard with the whole stage, whose layers are called one by "
            "one. Call it with each layer."
        )
    names, expected = [list(dict(each.named_children())) for each in (stage, given)]
    if names != expected:
        raise ValueError(
            f"parallelize returned a stage with the layers {names}, and was given {expected}. "
            "Keep the layers; what is in them may change."
        )
    return list(stage.children())


def sum_gradients(layers: Iterable[nn.Module]) -> None:
    """Let gradients be added up, not averaged: they are weighed before."""
    for module in fully_sharded(layers):
        module.set_gradient_divide_factor(1.0)


def reduce_next(modules: Iterable[Any], *, reduces: bool) -> None:
    """Say whether gradients are reduced in the next backward, or only kept."""
    for module in modules:
        module.set_requires_gradient_sync(reduces, recurse=False)
