"""Which layers a skip connects."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from gpipe.stage.skip import ISOLATE, SkipKey

__all__ = ["SkipRoute", "skip_routes", "uses_skips"]

_DONE = {"stash": "stashed", "pop": "popped"}


class SkipRoute(NamedTuple):
    """The way of a skip between two layers, by their positions in the model."""

    key: SkipKey
    stash_layer: int
    pop_layer: int


def uses_skips(layers: Iterable[nn.Module]) -> bool:
    """Whether any layer, or a module in it, stashes or pops."""
    modules = (module for layer in layers for module in layer.modules())
    return any(hasattr(type(module), "_skips") for module in modules)


def skip_routes(layers: Sequence[nn.Module]) -> list[SkipRoute]:
    """The skips from one layer to another; one that stays inside a layer has no route.

    Args:
        layers: All layers of the model, in order; what is nested in them is looked at, too.

    Raises:
        TypeError: A forward yields, and its class is not decorated.
        ValueError: A skip is not stashed once and then popped once.
    """
    sides: dict[str, dict[SkipKey, _Place]] = {"stash": {}, "pop": {}}
    for place in _places(layers):
        for verb, names in getattr(type(place.module), "_skips", {}).items():
            _add(sides[verb], verb, names, place)
    stashes, pops = sides.values()
    _refuse_unpaired(stashes, pops)
    routes = [SkipRoute(key, place.position, pops[key].position) for key, place in stashes.items()]
    return [route for route in routes if route.stash_layer != route.pop_layer]


class _Place(NamedTuple):
    """A module, and the layer that it is or is nested in."""

    position: int
    layer: nn.Module
    module: Any

    def __str__(self) -> str:
        inside = "" if self.module is self.layer else f", in its {type(self.module).__name__}"
        return f"layer {self.position} ({type(self.layer).__name__}{inside})"


def _places(layers: Sequence[nn.Module]) -> Iterator[_Place]:
    for position, layer in enumerate(layers):
        for module in layer.modules():
            place = _Place(position, layer, module)
            if inspect.isgeneratorfunction(type(module).forward):
                raise TypeError(
                    f"The forward of {place} yields, but its class is not decorated. "
                    "Put @skippable(stash=[…], pop=[…]) above it."
                )
            yield place


def _add(places: dict[SkipKey, _Place], verb: str, names: Iterable[str], place: _Place) -> None:
    for name in names:
        key = SkipKey(place.module._skip_namespaces.get(name), name)
        first = places.setdefault(key, place)
        if first is not place:
            raise ValueError(
                f"Skip {key} is {_DONE[verb]} twice, by {first} and {place}. {ISOLATE}"
            )


def _refuse_unpaired(stashes: Mapping[SkipKey, _Place], pops: Mapping[SkipKey, _Place]) -> None:
    for key in {**stashes, **pops}:
        stash, pop = stashes.get(key), pops.get(key)
        if stash is None:
            fact, remedy = f"popped by {pop} and never stashed", "Stash it in an earlier layer"
        elif pop is None:
            fact, remedy = f"stashed by {stash} and never popped", "Pop it in a later layer"
        elif pop.position < stash.position:
            fact, remedy = f"popped by {pop} before {stash} stashes it", "Pop it in a later layer"
        else:
            continue
        raise ValueError(f"Skip {key} is {fact}. {remedy}, both in one Namespace or in none.")
