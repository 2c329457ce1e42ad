"""Execution: carries a schedule out on real devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe.execution.all_reduce import ring_all_reduce
    from gpipe.execution.ring import order_by_host

__all__ = ["order_by_host", "ring_all_reduce"]

_HOMES = {
    "order_by_host": "gpipe.execution.ring",
    "ring_all_reduce": "gpipe.execution.all_reduce",
}


def __getattr__(name: str) -> Any:
    # On first use: one process needs nothing of them, and torch may be built without distributed.
    if name not in _HOMES:
        raise AttributeError(f"module 'gpipe.execution' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
