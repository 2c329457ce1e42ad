"""Runs layers on their aliases and brings the gradients together."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Parameter

from gpipe.stage.stage import Stage

__all__ = ["collect_gradients", "swapped_in"]


@contextmanager
def swapped_in(stages: Iterable[Stage]) -> Iterator[None]:
    """Let all layers compute with their aliases meanwhile."""
    aliases = [alias for stage in stages for alias in stage.aliases]
    try:
        for alias in aliases:
            alias.swap_in()
        yield
    finally:
        for alias in aliases:
            alias.swap_out()


def collect_gradients(
    stages: Sequence[Stage], names: Mapping[Parameter, str], run: Callable[[], None]
) -> dict[Parameter, Tensor]:
    """The gradients of a run of backwards; a run that fails leaves none behind.

    Args:
        stages: The stages whose backwards run.
        names: All trained parameters of the model, with their names.
        run: Runs the backwards.

    Raises:
        RuntimeError: A gradient has come to a parameter itself instead of its layer's alias.
    """
    with _set_aside(list(names)):
        try:
            with swapped_in(stages):
                run()
            _refuse_direct_gradients(names)
        finally:
            gradients = _take_gradients(stages)
    return gradients


def _take_gradients(stages: Iterable[Stage]) -> dict[Parameter, Tensor]:
    # In the order of the layers, so that the sum of a tied parameter has the same bits for any cut.
    total: dict[Parameter, Tensor] = {}
    for stage in stages:
        for alias in stage.aliases:
            for parameter, gradient in alias.take_gradients():
                earlier = total.pop(parameter, None)
                gradient = gradient.to(parameter.device)
                total[parameter] = gradient if earlier is None else earlier + gradient
    return total


@contextmanager
def _set_aside(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Leave `.grad` empty meanwhile, so that what arrives there directly is seen."""
    gradients = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _refuse_direct_gradients(names: Mapping[Parameter, str]) -> None:
    direct = [name for parameter, name in names.items() if parameter.grad is not None]
    if direct:
        raise RuntimeError(
            f"The gradient of {', '.join(direct)} went past its layer, which keeps the parameter "
            "somewhere else than in an attribute of its own, such as in a closure or a tuple. "
            "Use `self.NAME` where the layer computes."
        )
