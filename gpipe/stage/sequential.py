"""What kind of module can be cut into stages."""

import torch
from torch import nn

__all__ = ["require_sequential"]


def require_sequential(module: object) -> None:
    """Refuse what does not simply call its children, each with parameters of its own, in turn.

    Raises:
        TypeError: It is no `nn.Sequential`, has a forward of its own, or a part of it is a script.
        ValueError: It has no layer, or one module is in two layers.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module is a {type(module).__name__}, not an nn.Sequential. "
            "Write the model as nn.Sequential(layer, layer, …), which can be cut between layers."
        )
    if type(module).forward is not nn.Sequential.forward:
        raise TypeError(
            f"{type(module).__name__} has a forward of its own, which a pipeline would leave out. "
            "Move what it does into layers of a plain nn.Sequential."
        )
    if len(module) == 0:
        raise ValueError("module has no layer. Give the nn.Sequential at least one.")
    _refuse_scripts(module)
    _refuse_shared_modules(module)


def _refuse_scripts(sequential: nn.Sequential) -> None:
    """Refuse what keeps its parameters where no others can be put in their place."""
    for name, layer in sequential.named_children():
        if any(isinstance(module, torch.jit.ScriptModule) for module in layer.modules()):
            raise TypeError(
                f"Layer {name!r} is or contains a module of torch.jit, whose parameters cannot be "
                "replaced while a mini-batch runs. Give the module that it was made of; "
                "torch.compile may make that faster."
            )


def _refuse_shared_modules(sequential: nn.Sequential) -> None:
    """Refuse one module in two layers: it cannot live on two devices, nor have two gradients."""
    layer_of: dict[nn.Module, str] = {}
    for name, layer in sequential._modules.items():
        assert layer is not None
        for module in layer.modules():
            other = layer_of.setdefault(module, name)
            # What has no parameters, such as an activation, may be shared.
            if other != name and (module is layer or module._parameters):
                what = "the same module" if module is layer else f"one {type(module).__name__}"
                raise ValueError(
                    f"Layers {other!r} and {name!r} are or contain {what}, which cannot live in "
                    "two stages. Make two modules and let them share parameters: "
                    "b.weight = a.weight."
                )
