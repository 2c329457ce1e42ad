"""The caller's thread-local state, for the workers to run under."""

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["CallerState", "autocast_dtypes"]

P = ParamSpec("P")
R = TypeVar("R")


class CallerState:
    """What torch and Python keep per thread, as it is where this is made.

    A layer must not be able to tell that it runs in a worker: grad and inference mode, autocast,
    the default device and other modes, saved-tensor hooks and context variables are the caller's.
    """

    def __init__(self) -> None:
        self._variables = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = autocast_dtypes()
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        # The default device of `torch.set_default_device` is one of the function modes.
        self._modes = [*_function_modes(), *_get_current_dispatch_mode_stack()]

    def run(self, function: Callable[[], None]) -> None:
        """Call the function under this state; several threads may do so at once."""
        self._variables.copy().run(self._run_under_modes, function)

    def drop_casts(self) -> None:
        """Let go of the weights that autocast has cast for the workers."""
        if self._autocast:
            torch.clear_autocast_cache()

    def without_autocast(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function as it runs where autocast ended before, as a backward does by custom."""
        if not self._autocast:
            return function

        def paused(*args: P.args, **kwargs: P.kwargs) -> R:
            with _autocast_paused(list(self._autocast)):
                return function(*args, **kwargs)

        return paused

    def _run_under_modes(self, function: Callable[[], None]) -> None:
        with ExitStack() as stack:
            for manager in self._managers():
                stack.enter_context(manager)
            function()

    def _managers(self) -> Iterator[AbstractContextManager[Any]]:
        if self._inference:  # leaving it out is not the same as False, which slows every operation
            yield torch.inference_mode()
        yield torch.set_grad_enabled(self._grad)
        for device_type, dtype in self._autocast.items():
            yield _autocast_on(device_type, dtype, self._autocast_cache)
        if self._saved_tensors_hooks is not None:
            yield saved_tensors_hooks(*self._saved_tensors_hooks)
        yield from self._modes


def _function_modes() -> list[AbstractContextManager[Any]]:
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def autocast_dtypes() -> dict[str, torch.dtype]:
    """The types of devices for which autocast is on in this thread, each with its dtype."""
    return {
        device_type: torch.get_autocast_dtype(device_type)
        for device_type in torch._C._autocast_supported_devices()
        if torch.is_autocast_enabled(device_type)
    }


@contextmanager
def _autocast_on(device_type: str, dtype: torch.dtype, has_cache: bool) -> Iterator[None]:
    # Leaving `torch.autocast` would drop the cache of cast weights, which all threads share: the
    # worker that is done first would let the others cast theirs again.
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    had_cache = torch.is_autocast_cache_enabled()
    torch.autocast_increment_nesting()
    _set_autocast(device_type, True, dtype, has_cache)
    try:
        yield
    finally:
        _set_autocast(device_type, *before, had_cache)
        torch.autocast_decrement_nesting()


def _set_autocast(device_type: str, is_on: bool, dtype: torch.dtype, has_cache: bool) -> None:
    torch.set_autocast_enabled(device_type, is_on)
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(has_cache)


@contextmanager
def _autocast_paused(device_types: list[str]) -> Iterator[None]:
    # Leaving and entering `torch.autocast` would also drop its cache of cast weights.
    for device_type in device_types:
        torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        for device_type in device_types:
            torch.set_autocast_enabled(device_type, True)
