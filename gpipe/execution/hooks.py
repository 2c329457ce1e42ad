"""Keeps hooks of parameters quiet where no gradient comes."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["set_quiet"]


class _Hook:
    """A user's hook that can leave out one call."""

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        self._hook = hook
        self.is_quiet = True

    def __call__(self, argument: Any) -> Any:
        was_quiet, self.is_quiet = self.is_quiet, False
        return None if was_quiet else self._hook(argument)


def set_quiet(leaf: Tensor, is_quiet: bool) -> None:
    """Let the hooks of a leaf leave out the call that is coming, or not.

    A leaf that gets no gradient is not in a plain model's graph at all. Behind a node that stands
    for the whole pipeline it is, and the engine would call its hooks with None.
    """
    of_leaf: tuple[dict[Any, Any] | None, ...]
    of_leaf = (leaf._backward_hooks, leaf._post_accumulate_grad_hooks)
    for hooks in filter(None, of_leaf):
        for key, hook in hooks.items():
            if isinstance(hook, _Hook):
                hook.is_quiet = is_quiet
            elif is_quiet:
                hooks[key] = _Hook(hook)
