"""Skips: tensors that jump over layers, from stash to pop."""

import functools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import GeneratorType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

__all__ = [
    "ISOLATE",
    "Namespace",
    "SkipKey",
    "SkipStore",
    "pop",
    "skippable",
    "stash",
    "using",
]

M = TypeVar("M", bound=nn.Module)


class Namespace:
    """Keeps skips apart that have the same names: no two namespaces are equal.

    A model that is copied or pickled as a whole has new ones, in which its layers still meet.
    """


class SkipKey(NamedTuple):
    """What tells one skip of a model from another; `isolate` gives its name a namespace."""

    namespace: Namespace | None
    name: str

    def __str__(self) -> str:
        return f"{self.name!r}" if self.namespace is None else f"{self.name!r} (isolated)"


class _Request(NamedTuple):
    """What a forward yields."""

    verb: str
    name: str
    tensor: Tensor | None = None


def stash(name: str, tensor: Tensor | None) -> _Request:
    """What a forward yields to put a tensor, or None, aside for a later layer."""
    if not isinstance(tensor, Tensor | None):
        kind = type(tensor).__name__
        raise TypeError(f"Skip {name!r} is of type {kind}. Stash one tensor, or None.")
    return _Request("stash", name, tensor)


def pop(name: str) -> _Request:
    """What a forward yields to be sent what an earlier layer has stashed."""
    return _Request("pop", name)


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """Let the layers of a class stash tensors for later layers and pop those of earlier ones.

    The class stays what it is, except that its forward may yield::

        @skippable(stash=["early"], pop=["earlier"])
        class Block(nn.Module):
            def forward(self, input):
                yield stash("early", input)
                earlier = yield pop("earlier")
                return input + earlier

    A forward uses each name once. A subclass that is not decorated itself has the names of its
    parent; it may call `super().forward(input)`, which returns the output. Layers gain the method
    `isolate(namespace, only=None)`, for classes that are used for several skips of one model.

    Args:
        stash: The names that the forward stashes.
        pop: The names that it pops.

    Raises:
        TypeError: The names are no list of strings, or the class is no `nn.Module`.
        ValueError: A name stands on both sides.
    """
    names = {"stash": _names("stash", stash), "pop": _names("pop", pop)}
    if set(names["stash"]) & set(names["pop"]):
        raise ValueError(f"{names} has a name on both sides. Give each skip a name of its own.")

    def decorate(cls: type[M]) -> type[M]:
        if not issubclass(cls, nn.Module):
            raise TypeError(f"{cls!r} is no nn.Module. Put @skippable above the class of a layer.")
        if "_skips" not in dir(cls):
            _make_skippable(cls)
        cls._skips = names  # type: ignore[attr-defined]
        return cls

    return decorate


class SkipStore:
    """Holds what is stashed, until it is popped or sent on.

    Args:
        arrived: What earlier stages have stashed for the layers that use this store.
        may_replace: Whether a second stash drops the first; otherwise it is an error.
    """

    def __init__(
        self, arrived: Mapping[SkipKey, Tensor | None] | None = None, *, may_replace: bool = False
    ) -> None:
        self._arrived = dict(arrived or {})
        self._stashed: dict[SkipKey, Tensor | None] = {}
        self._may_replace = may_replace

    def put(self, key: SkipKey, tensor: Tensor | None) -> None:
        """Keep a tensor, or None, under a key that is free."""
        if not self._may_replace and (key in self._stashed or key in self._arrived):
            raise ValueError(f"Skip {key} is stashed twice before it is popped. {ISOLATE}")
        self._stashed[key] = tensor

    def take(self, key: SkipKey) -> Tensor | None:
        """What was put under the key, or has arrived; it must be there, and is forgotten."""
        for tensors in (self._stashed, self._arrived):
            if key in tensors:
                return tensors.pop(key)
        raise ValueError(
            f"Skip {key} is popped, but was not stashed, or has been popped before. "
            "Stash it in an earlier layer of the same forward, both in one Namespace or in none."
        )

    def left(self) -> dict[SkipKey, Tensor | None]:
        """What was put here and not taken: it goes to later stages."""
        return dict(self._stashed)


@contextmanager
def using(store: SkipStore) -> Iterator[None]:
    """Let the layers that run in this thread use `store` meanwhile."""
    before, _thread.store = _thread.store, store
    try:
        yield
    finally:
        _thread.store = before


ISOLATE = "Give each pair of layers a Namespace of its own: layer.isolate(namespace)."


class _Call:
    """One forward of one layer: answers what it yields, and knows what is still to come."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._kind = type(layer).__name__
        self._unused = {verb: set(names) for verb, names in layer._skips.items()}

    def output(self, result: Any) -> Any:
        """The output, given what `forward` returned: the output itself, or a generator of it."""
        return self._drive(result) if isinstance(result, GeneratorType) else result

    def require_all_used(self) -> None:
        """Refuse a forward that has left out a declared name."""
        for verb, names in self._unused.items():
            if names:
                raise ValueError(
                    f"{self._kind} declares {verb}={sorted(names)}, but did not {verb} it. Do it "
                    "in every forward (None where there is no tensor), or do not declare the name."
                )

    def _drive(self, generator: Generator[Any, Any, Any]) -> Any:
        answer = None
        try:
            while True:
                answer = self._answer(generator.send(answer))
        except StopIteration as end:
            return end.args[0] if end.args else None  # torch.compile does not know `end.value`
        finally:
            generator.close()  # a refused `yield` may stand under torch.no_grad()

    def _answer(self, request: object) -> Tensor | None:
        if not isinstance(request, _Request):
            raise TypeError(
                f"{self._kind} yields an object of type {type(request).__name__}. "
                "Yield only stash(name, tensor) and pop(name), and return the output."
            )
        verb, name, tensor = request
        if name not in self._unused[verb]:
            raise ValueError(
                f"{self._kind} yields {verb}({name!r}), but declares {verb}="
                f"{list(self.layer._skips[verb])}, each to be used once. "
                "Add the name to @skippable, or leave this one out."
            )
        self._unused[verb].remove(name)
        key = SkipKey(self.layer._skip_namespaces.get(name), name)
        if verb == "pop":
            return _thread.store.take(key)
        # A view has a gradient of its own: where the tensor is also the output, or another skip,
        # their sum is taken in the same order whether the skip crosses a cut or not.
        _thread.store.put(key, None if tensor is None else tensor.view_as(tensor))
        return None


class _Thread(threading.local):
    """What the skippable layers share that run in one thread."""

    def __init__(self) -> None:
        # A plain forward that failed may have left something here: the next one replaces it.
        self.store = SkipStore(may_replace=True)
        self.call: _Call | None = None


_thread = _Thread()


def _driven(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward as an ordinary one, which does not yield but returns its output."""

    @functools.wraps(forward)
    def driven(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer = _thread.call
        if outer is not None and outer.layer is self:  # by `super().forward(…)`
            return outer.output(forward(self, *args, **kwargs))
        call = _thread.call = _Call(self)
        try:
            output = call.output(forward(self, *args, **kwargs))
        finally:
            _thread.call = outer
        call.require_all_used()
        return output

    return driven


def _make_skippable(cls: Any) -> None:
    """Let the forward of the class yield, and that of each subclass that has its own."""
    own = vars(cls).get("__init_subclass__")

    def init_subclass(subclass: Any, /, **kwargs: Any) -> None:
        parent = super(cls, subclass).__init_subclass__
        (own.__get__(None, subclass) if own else parent)(**kwargs)
        if "forward" in vars(subclass):
            subclass.forward = _driven(subclass.forward)

    cls.__init_subclass__ = classmethod(init_subclass)
    cls.forward = _driven(cls.forward)
    cls.isolate = _isolate
    cls._skip_namespaces = {}


def _isolate(self: Any, namespace: Namespace, only: Iterable[str] | None = None) -> Any:
    """Put this layer's skips, or `only` some, where just layers isolated likewise see them.

    Pass the same namespace to the layer that stashes and to the one that pops; returns the layer.
    """
    if not isinstance(namespace, Namespace):
        raise TypeError(f"namespace is {namespace!r}. Pass a Namespace().")
    names = [name for names in self._skips.values() for name in names]
    chosen = names if only is None else _names("only", only)
    if not set(chosen) <= set(names):
        raise ValueError(f"only is {list(chosen)}. Choose from this layer's skips: {names}.")
    self._skip_namespaces = {**self._skip_namespaces, **dict.fromkeys(chosen, namespace)}
    return self


def _names(label: str, names: Iterable[str]) -> tuple[str, ...]:
    # A string would be taken for its letters; `@skippable` without parentheses brings a class.
    listed: list[Any] = [None] if isinstance(names, str | type) else list(names)
    if not all(isinstance(name, str) for name in listed):
        raise TypeError(f"{label} is {names!r}. Pass a list of names, such as ['early'].")
    return tuple(dict.fromkeys(listed))
