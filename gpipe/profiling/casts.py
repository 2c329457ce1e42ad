"""Which weights autocast has cast and keeps."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = ["casts_forgotten", "kept_bytes"]


@contextmanager
def casts_forgotten(device_type: str) -> Iterator[None]:
    """Let autocast drop its copies of weights afterwards, which it keeps until it ends.

    It may drop the caller's, too: it makes them again when they are needed.
    """
    try:
        yield
    finally:
        if torch.is_autocast_enabled(device_type):
            torch.clear_autocast_cache()


def kept_bytes(parameters: Iterable[Tensor]) -> int:
    """The bytes of the copies that autocast has of these parameters now."""
    return sum(_kept_bytes(each) for each in parameters if _may_be_kept(each))


def _may_be_kept(parameter: Tensor) -> bool:
    is_plain = parameter.dim() > 0 and not is_traceable_wrapper_subclass(parameter)
    return (
        is_plain
        and parameter.dtype == torch.float32
        and parameter.requires_grad
        and torch.is_autocast_enabled(parameter.device.type)
        and torch.is_autocast_cache_enabled()
    )


def _kept_bytes(parameter: Tensor) -> int:
    dtype = torch.get_autocast_dtype(parameter.device.type)
    # There is no list of what autocast keeps. A product with nothing needs the copy and no time: if
    # nothing is cast for it, the copy was there.
    nothing = torch.empty(parameter.shape[-1], 0, dtype=dtype, device=parameter.device)
    with _Casts() as casts:
        torch.matmul(parameter, nothing)
    return 0 if casts.number else parameter.numel() * dtype.itemsize


class _Casts(TorchDispatchMode):
    """Counts casts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.number += function is torch.ops.aten._to_copy.default
        return function(*args, **kwargs or {})
