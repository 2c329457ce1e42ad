"""Lets one layer give its tensors their first values, on the host."""

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from gpipe.stage.device import HOST, device_of
from gpipe.stage.randomness import holding_generator
from gpipe.stage.registered import Place, loose, places, reset_name

__all__ = ["FirstValues", "first_values", "generators_kept", "undisturbed"]


class FirstValues(NamedTuple):
    """What the resets of a layer have given.

    Attributes:
        values: For each tensor of the layer that is on meta one on the host.
        blanks: Those that got no value, or not in every element, and why.
        failures: What failed, by the place.
        loose: Attributes of the layer that are still on meta.
    """

    values: dict[Tensor, Tensor]
    blanks: list[tuple[Place, str]]
    failures: dict[str, Exception]
    loose: list[tuple[str, Tensor]]


def first_values(layer: nn.Module, seed: int, label: str = "") -> FirstValues:
    """Resets the layer on the host, and leaves its own tensors as they are.

    A tensor on meta holds NaN before, or a number: what still holds it got no value. A first value
    may equal the number, and a boolean always equals one of two: where one does, everything is
    done again with another number. What is real lends a copy, which is then forgotten.

    Args:
        layer: The layer.
        seed: That of all generators.
        label: What messages call the layer.
    """
    found = [place for place in places(layer, label) if not is_lazy(place.tensor)]
    on_meta: dict[Tensor, Place] = {}
    for place in found:
        if place.tensor.is_meta:
            on_meta.setdefault(place.tensor, place)
    stand_ins = {place.tensor: _stand_in(place.tensor) for place in found}
    with _lent(stand_ins):
        trials = [_Trial(layer, found, list(on_meta), seed, attempt=0)]
        blank = trials[0].blank()
        if blank:
            trials.append(_Trial(layer, found, list(on_meta), seed, attempt=1))
            again = trials[1].blank()
            blank = {each: again[each] & at for each, at in blank.items() if each in again}
        still_loose = list(loose(layer, label))
    blanks = [on_meta[each] for each, at in blank.items() if at.any()]
    return FirstValues(
        {tensor: stand_ins[tensor].to(tensor.dtype) for tensor in on_meta},
        [(place, _cause(place)) for place in blanks if place.module not in trials[0].failed],
        {f"{label}{path}": error for path, error in trials[0].failures.items()},
        still_loose,
    )


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Let layers be reset, whatever modes the caller is in, and put generators back afterwards."""
    num_threads = torch.get_num_threads()
    with generators_kept(device), torch.inference_mode(False), torch.no_grad(), HOST:
        try:
            torch.set_num_threads(1)  # sums, as in a norm, are taken in another order by several
            yield
        finally:
            torch.set_num_threads(num_threads)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Put the generators of the host and of the device back to what they are now."""
    with holding_generator():
        states = [(each, each.random_state()) for each in device_of(device).generators]
        python_state, numpy_state = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_random_state(state)
            random.setstate(python_state)
            np.random.set_state(numpy_state)


class _Trial:
    """One reset of all modules of a layer, whose tensors are real meanwhile.

    Attributes:
        failures: What a reset raised, or did wrong, by the place.
        failed: The modules that it was.
    """

    def __init__(
        self, layer: nn.Module, found: list[Place], tensors: list[Tensor], seed: int, attempt: int
    ) -> None:
        self.failures: dict[str, Exception] = {}
        self.failed: set[nn.Module] = set()
        self._tensors = tensors
        self._attempt = attempt
        for tensor in tensors:
            tensor.data.fill_(_filling(tensor.dtype, attempt))
        shapes = [place.tensor.shape for place in found]
        _seed(seed)
        for module in _children_first(layer, set()):
            self._reset(module, layer)
        for place, shape in zip(found, shapes, strict=True):
            self._put_back(place, shape)

    def blank(self) -> dict[Tensor, Tensor]:
        """The tensors that hold what they were filled with, and in which elements."""
        found = {each: _is_blank(each.detach(), self._attempt) for each in self._tensors}
        return {tensor: elements for tensor, elements in found.items() if elements.any()}

    def _reset(self, module: nn.Module, layer: nn.Module) -> None:
        name = reset_name(module)
        if name is None:
            return
        try:
            _call(module, name)
        except Exception as error:  # noqa: BLE001 - it is told, together with what else is wrong
            path = next(path for path, each in layer.named_modules() if each is module)
            self._fail(module, f"{path}.{name}()" if path else f"{name}()", error)

    def _put_back(self, place: Place, shape: torch.Size) -> None:
        """Let a tensor stay the object that it is where the reset has put another."""
        now, tensor = place.container.get(place.key), place.tensor
        place.container[place.key] = tensor
        if now is None or now.shape != shape or tensor.shape != shape:
            left = None if now is None else tuple((tensor if now is tensor else now).shape)
            text = f"its reset leaves the shape {left} where {tuple(shape)} was"
            self._fail(place.module, f"{place.kind} {place.name!r}", ValueError(text))
            tensor.data = tensor.data.new_zeros(shape)
        elif now is not tensor:
            tensor.data.copy_(now)

    def _fail(self, module: nn.Module, place: str, error: Exception) -> None:
        self.failures.setdefault(place, error)
        self.failed.add(module)


def _call(module: nn.Module, name: str) -> None:
    """Reset the module, through its parametrizations where it has some."""
    if not parametrize.is_parametrized(module):
        getattr(module, name)()
        return
    with parametrize.cached():  # so that what is written to is not computed anew and lost
        getattr(module, name)()
        for key, _ in module.parametrizations.named_children():  # type: ignore[union-attr]
            setattr(module, key, getattr(module, key))


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _children_first(child, seen)
    yield module


@contextmanager
def _lent(stand_ins: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let the tensors be their stand-ins meanwhile, wherever they are referred to."""
    _exchange(stand_ins.items())
    try:
        yield
    finally:
        _exchange(stand_ins.items())


def _exchange(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    # Not torch.utils.swap_tensors, which exchanges attributes too, and refuses what has weak
    # references, as an LSTM's weights have: they are to see the new memory.
    for tensor, other in pairs:
        torch._C._swap_tensor_impl(tensor, other)


def _stand_in(tensor: Tensor) -> Tensor:
    real = torch.empty_like(tensor, device=HOST) if tensor.is_meta else tensor.detach().clone()
    return real.requires_grad_(tensor.requires_grad)


def _filling(dtype: torch.dtype, attempt: int) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return attempt if dtype is torch.bool else torch.iinfo(dtype).max - attempt


def _is_blank(tensor: Tensor, attempt: int) -> Tensor:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.isnan()
    return tensor == _filling(tensor.dtype, attempt)


def _cause(place: Place) -> str:
    name, kind = reset_name(place.module), type(place.module).__name__
    return f"{kind} has no reset_parameters()" if name is None else f"{kind}.{name}() leaves it out"


def _seed(seed: int) -> None:
    """Seed every generator of the host from the number."""
    host = device_of(HOST)
    host.set_random_state(host.seeded_state(seed))
    random.seed(seed)
    np.random.seed(seed % 2**32)
