"""Pipeline-parallel training in PyTorch, with the gradients of one device."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe.pipeline import GPipe, StepResult
    from gpipe.pipeline.clipping import clip_grad_norm_
    from gpipe.stage.recompute import is_recomputing
    from gpipe.stage.skip import Namespace, pop, skippable, stash

__all__ = [
    "GPipe",
    "Namespace",
    "StepResult",
    "clip_grad_norm_",
    "is_recomputing",
    "pop",
    "skippable",
    "stash",
]

__version__ = version("gpipe")

_HOMES = {
    "GPipe": "gpipe.pipeline",
    "Namespace": "gpipe.stage.skip",
    "StepResult": "gpipe.pipeline",
    "clip_grad_norm_": "gpipe.pipeline.clipping",
    "is_recomputing": "gpipe.stage.recompute",
    "pop": "gpipe.stage.skip",
    "skippable": "gpipe.stage.skip",
    "stash": "gpipe.stage.skip",
}


def __getattr__(name: str) -> Any:
    # The public names load with their first use, so that `gpipe --help` need not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'gpipe' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
