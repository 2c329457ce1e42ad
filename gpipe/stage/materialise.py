"""Gives layers on meta their memory and their first values."""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe.stage.first_values import FirstValues, first_values, undisturbed
from gpipe.stage.registered import loose, obstacles, places, reset_name

__all__ = ["materialise"]

Layers = Mapping[int, nn.Module]
_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"


def materialise(
    layers: Layers, wanted: Collection[int], device: torch.device | str, seed: int
) -> None:
    """Gives wanted layers first values that no balance changes.

    The modules of a layer are reset, children first, by `reset_parameters()` or else
    `_reset_parameters()`. All generators are seeded from (seed, index of the layer) meanwhile and
    put back afterwards. One layer at a time is reset on the host, so that every kind of device gets
    the same values, and is then brought to its device.

    A parameter or buffer of several layers has the values that the first of them gives it. Where
    that layer is not wanted it is reset, too, but nothing else of it is kept. Tensors stay the
    objects that they are, with attributes and hooks. A tensor that is not on meta is let be.

    Args:
        layers: All layers of the model by their index in it, on meta or not.
        wanted: The indices of those that are to be real.
        device: Where what is made is to live.
        seed: That of the model, the same in every process.

    Raises:
        ValueError: A tensor would stay without its values, or a reset fails. All are named, and
            no layer has changed.
    """
    device = torch.device(device)
    owners, faults = _owners(layers), _Faults(layers)
    wanted_tensors = (place.tensor for index in wanted for place in places(layers[index]))
    kept = {tensor: owners[tensor] for tensor in wanted_tensors if tensor in owners}
    needed = {*kept.values(), *(index for index in wanted if any(loose(layers[index])))}
    values: dict[Tensor, Tensor] = {}
    with undisturbed(device):
        for index in sorted(needed):
            made = first_values(layers[index], _mixed(seed, index), faults.label(index))
            faults.note(made, {each for each in made.values if owners[each] == index})
            if index in wanted:
                faults.note_loose(made, kept)
            values |= {
                each: value.to(device)
                for each, value in made.values.items()
                if kept.get(each) == index
            }
        faults.refuse()
        for tensor, value in values.items():
            _give(tensor, value)
    _flatten(layers[index] for index in wanted)


class _Faults:
    """What is wrong with the layers, all of it in one error."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._texts: dict[str, str] = {}
        self._error: Exception | None = None
        self._note_hopeless()

    def label(self, index: int) -> str:
        """What messages call the layer."""
        return f"layer {index} ({type(self._layers[index]).__name__}): "

    def note(self, made: FirstValues, owned: Collection[Tensor]) -> None:
        """Take in what the resets of a layer did wrong with tensors of its own."""
        for place, cause in made.blanks:
            if place.tensor in owned:
                self._texts.setdefault(str(place), cause)
        for where, error in made.failures.items():
            self._texts.setdefault(where, f"{type(error).__name__}: {error}")
            self._error = self._error or error

    def note_loose(self, made: FirstValues, kept: Collection[Tensor]) -> None:
        """Take in what stays on meta because it is not registered."""
        for where, tensor in made.loose:
            if tensor not in kept:
                self._texts.setdefault(where, "it is registered neither as parameter nor as buffer")

    def refuse(self) -> None:
        """Raise what came together."""
        if self._texts:
            lines = "".join(f"\n  {where}: {text}" for where, text in self._texts.items())
            raise ValueError(
                f"The model is on meta, and some tensors cannot get their first values:{lines}\n"
                "Let the reset_parameters() of each module named here set its parameters and "
                "buffers, or build the model with its values, not under torch.device('meta')."
            ) from self._error

    def _note_hopeless(self) -> None:
        """What no process can make, whichever layers it wants: all of them shall say the same."""
        owners = _owners(self._layers)
        found = []
        for index, layer in sorted(self._layers.items()):
            here = list(places(layer, self.label(index)))
            found += here
            within_reset = {
                module for each in layer.modules() if reset_name(each) for module in each.modules()
            }
            for place in here:
                is_own = owners.get(place.tensor) == index and place.tensor.numel()
                if is_own and place.module not in within_reset:
                    kind = type(place.module).__name__
                    self._texts.setdefault(str(place), f"{kind} has no reset_parameters()")
        self._texts |= {str(place): cause for place, cause in obstacles(found)}


def _owners(layers: Layers) -> dict[Tensor, int]:
    """The first layer of each tensor that is on meta."""
    owners: dict[Tensor, int] = {}
    for index, layer in sorted(layers.items()):
        for place in places(layer):
            if place.tensor.is_meta and not is_lazy(place.tensor):
                owners.setdefault(place.tensor, index)
    return owners


def _give(tensor: Tensor, value: Tensor) -> None:
    """Let a tensor on meta have the memory of another, and stay the object that it is."""
    # Hooks stand in what is exchanged, and come back when they are set again.
    hooks = {name: getattr(tensor, name) for name in _HOOKS}
    torch._C._swap_tensor_impl(tensor, value.requires_grad_(tensor.requires_grad))
    for name, registered in hooks.items():
        if registered is not None:
            setattr(tensor, name, registered)


def _flatten(layers: Iterable[nn.Module]) -> None:
    """Let RNNs lay out their weights as their device likes it, as when they move there."""
    for module in chain.from_iterable(layer.modules() for layer in layers):
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _mixed(seed: int, index: int) -> int:
    """A seed in which every bit of both has a say."""
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63
