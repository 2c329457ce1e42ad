"""Lets a backward find the layers as their forward left them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.nn import Parameter

__all__ = ["LayersThen"]


class LayersThen:
    """What a recompute needs of the layers that the caller may change before the backward.

    Args:
        layers: All layers; the training flags of what is in them are kept.
        names: The parameters, with the names that errors give them.
        recomputes: Whether anything will be recomputed; else only the parameters' memory matters.
    """

    def __init__(
        self, layers: Iterable[nn.Module], names: Mapping[Parameter, str], recomputes: bool
    ) -> None:
        modules = (module for layer in layers for module in layer.modules())
        self._flags = {module: module.training for module in modules} if recomputes else {}
        self._versions = {p: p._version for p in names} if recomputes else {}
        self._addresses = {parameter: parameter.data_ptr() for parameter in names}
        self._names = names

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put the training flags back to what they were then, meanwhile.

        Raises:
            RuntimeError: A parameter was written to since; its old values are gone.
        """
        self._require_same_memory()
        self._require_same_parameters()
        changed = [module for module, flag in self._flags.items() if module.training != flag]
        try:
            for module in changed:
                module.training = self._flags[module]
            yield
        finally:
            for module in changed:
                module.training = not self._flags[module]

    def _require_same_memory(self) -> None:
        replaced = [
            self._names[parameter]
            for parameter, address in self._addresses.items()
            if parameter.data_ptr() != address
        ]
        if replaced:
            raise RuntimeError(
                f"The data of {', '.join(replaced)} was replaced between the forward and the "
                "backward, so its gradient would be lost. Call backward() first."
            )

    def _require_same_parameters(self) -> None:
        changed = [
            self._names[parameter]
            for parameter, version in self._versions.items()
            if parameter._version != version
        ]
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)} changed in place between the forward and the backward, so "
                "the forward cannot be repeated. Call backward() before optimizer.step()."
            )
