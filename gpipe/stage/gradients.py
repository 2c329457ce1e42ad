"""Runs layers on their aliases and brings the gradients together."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from torch.nn import Parameter

from gpipe.stage.alias import Aliases
from gpipe.stage.insist import insist

__all__ = ["Retain", "collect_gradients", "summed", "swapped_in", "take_gradients"]

Retain = Callable[[Iterable[Tensor]], None]


@contextmanager
def swapped_in(aliases: Sequence[Aliases]) -> Iterator[None]:
    """Let all layers compute with their aliases meanwhile."""
    try:
        for alias in aliases:
            alias.swap_in()
        yield
    finally:
        insist(alias.swap_out for alias in aliases)


def collect_gradients(
    aliases: Sequence[Aliases],
    names: Mapping[Parameter, str],
    run: Callable[[], None],
    take: Callable[[], dict[Parameter, Tensor]],
) -> dict[Parameter, Tensor]:
    """The gradients of a run of backwards; a run that fails leaves none behind.

    Args:
        aliases: Those of the layers whose backwards run.
        names: All trained parameters of the model, with their names.
        run: Runs the backwards.
        take: Takes what has come together when they have.

    Raises:
        RuntimeError: A gradient has come to a parameter itself instead of its layer's alias.
    """
    with _set_aside(list(names)):
        try:
            with swapped_in(aliases):
                run()
                left_alone = {each for alias in aliases for each in alias.left_alone}
                _refuse_direct_gradients(
                    {each: name for each, name in names.items() if each not in left_alone}
                )
                return take()
        finally:
            insist(alias.clear for alias in aliases)


def take_gradients(aliases: Iterable[Aliases], retain: Retain) -> dict[Parameter, Tensor]:
    """What has come together, summed where layers share a parameter.

    Args:
        aliases: Those of the layers, in order.
        retain: Keeps what the stages have made while the caller, who then drops it, still uses it.
    """
    aliases = list(aliases)
    total = summed((pair for alias in aliases for pair in alias.take_gradients()), retain)
    return total | dict(pair for alias in aliases for pair in alias.take_left_alone())


def summed(
    gradients: Iterable[tuple[Parameter, Tensor]], retain: Retain
) -> dict[Parameter, Tensor]:
    """The sum for each parameter.

    In the order of the layers, so that that of a tied parameter has the same bits for any cut.
    """
    total: dict[Parameter, Tensor] = {}
    for parameter, gradient in gradients:
        earlier = total.pop(parameter, None)
        if earlier is not None:
            retain([earlier, gradient])
            gradient = earlier + gradient.to(earlier.device)
        elif gradient.device != parameter.device:
            retain([gradient])
            gradient = gradient.to(parameter.device)
        total[parameter] = gradient
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
        pairs = list(zip(parameters, gradients, strict=True))
        insist([partial(_put_back, pairs)])


def _put_back(pairs: Sequence[tuple[Parameter, Tensor | None]]) -> None:
    for parameter, gradient in pairs:
        parameter.grad = gradient


def _refuse_direct_gradients(names: Mapping[Parameter, str]) -> None:
    direct = [name for parameter, name in names.items() if parameter.grad is not None]
    if direct:
        raise RuntimeError(
            f"The gradient of {', '.join(direct)} went past its layer, which keeps the parameter "
            "somewhere else than in an attribute of its own, such as in a closure or a tuple. "
            "Use `self.NAME` where the layer computes."
        )
