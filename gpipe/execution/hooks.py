"""Keeps hooks of parameters quiet where no gradient comes."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["keep_quiet"]

Hook = Callable[[Any], Any]


class _Patient:
    """A hook of a tensor that is not called without a gradient, and sees whether one came."""

    def __init__(self, hook: Hook | None = None) -> None:
        self._hook = hook
        self.came = False

    def __call__(self, gradient: Tensor | None) -> Any:
        self.came = gradient is not None
        return self._hook(gradient) if self._hook and gradient is not None else None


class _After:
    """A hook behind the accumulation that is called if there was something to accumulate."""

    def __init__(self, hook: Hook, before: _Patient) -> None:
        self._hook = hook
        self.before = before

    def __call__(self, leaf: Tensor) -> None:
        if self.before.came:
            self._hook(leaf)


def keep_quiet(leaf: Tensor) -> None:
    """See to it that hooks of this leaf are called for gradients only, from now on.

    A leaf that gets no gradient is not in a plain model's graph at all. Behind a node that stands
    for the whole pipeline it is, and the engine would call its hooks with None. Another use of the
    leaf may yet bring one, so that each hook has to ask when its time comes.
    """
    after: dict[Any, Hook] = leaf._post_accumulate_grad_hooks or {}
    if any(not isinstance(hook, _After) for hook in after.values()):
        before = _Patient()
        leaf.register_hook(before)  # type: ignore[no-untyped-call]
        after.update({key: _After(hook, before) for key, hook in after.items()})
    hooks: dict[Any, Hook] = leaf._backward_hooks or {}
    for key, hook in hooks.items():
        if not isinstance(hook, _Patient):
            hooks[key] = _Patient(hook)
