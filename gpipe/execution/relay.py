"""Sums the gradients of a parameter that layers of several workers share."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple, cast

from torch import Tensor
from torch.nn import Parameter

from gpipe.execution import parcel
from gpipe.execution.peer import Peer, Posted
from gpipe.execution.pipe import Pipe
from gpipe.stage.boundary import Gradients
from gpipe.stage.device import Device

__all__ = ["Tie", "relayed", "ties_of"]

_FIRST_TAG = 2**30  # above those of wires


class Tie(NamedTuple):
    """A parameter that several workers have, each a copy.

    Attributes:
        number: Which of all ties this is; the same on every worker.
        parameter: The copy of this process; None where it has none.
        layers: The layers that use it, ascending.
        workers: The worker of each of them.
    """

    number: int
    parameter: Parameter | None
    layers: Sequence[int]
    workers: Sequence[int]

    @property
    def legs(self) -> list[tuple[int, list[int]]]:
        """The way of the sum: each worker on it with the layers that are next."""
        pairs = groupby(zip(self.layers, self.workers, strict=True), lambda pair: pair[1])
        return [(worker, [layer for layer, _ in group]) for worker, group in pairs]


def ties_of(layers: Sequence[Iterable[Parameter]], workers: Sequence[int], here: int) -> list[Tie]:
    """The parameters that layers of several workers share.

    Args:
        layers: The parameters of each layer of the model.
        workers: The worker of each layer.
        here: That of this process.
    """
    users: dict[Parameter, list[int]] = {}
    for index, parameters in enumerate(layers):
        for parameter in dict.fromkeys(parameters):
            users.setdefault(parameter, []).append(index)
    by_worker = [
        (each, using, [workers[layer] for layer in using]) for each, using in users.items()
    ]
    shared = [each for each in by_worker if len(set(each[2])) > 1]
    return [
        # A worker that does not have it must not keep it alive.
        Tie(number, parameter if here in owners else None, using, owners)
        for number, (parameter, using, owners) in enumerate(shared)
    ]


def relayed(
    tie: Tie, gradients: Mapping[int, Sequence[Tensor]], pipe: Pipe, device: Device
) -> tuple[Tensor | None, list[Posted]]:
    """The sum over all layers, on every worker that has the parameter.

    It goes from worker to worker in the order of the layers, so that it has the bits that it has
    in one process; the last one tells the others.

    Args:
        tie: The parameter.
        gradients: Those of the layers which are here, in the order in which they are added.
        pipe: The workers.
        device: Where the parameter lives here.

    Returns:
        The sum, None where no layer has a gradient; and what is still on its way from here.
    """
    tag = _FIRST_TAG + 2 * tie.number
    total: Tensor | None = None
    posted: list[Posted] = []
    legs = tie.legs
    for worker, layers in legs[:1]:
        if worker == pipe.worker:
            total = _added(None, layers, gradients)
    for (before, _), (worker, layers) in pairwise(legs):
        if before == pipe.worker:
            posted += parcel.send([total], pipe.peer(worker), device, tag)
        if worker == pipe.worker:
            arrived = _received(pipe.peer(before), device, tag)
            total = _added(arrived, layers, gradients)
    last = legs[-1][0]
    others = [worker for worker in dict.fromkeys(tie.workers) if worker != last]
    if pipe.worker == last:
        for worker in others:
            posted += parcel.send([total], pipe.peer(worker), device, tag)
    elif pipe.worker in others:
        total = _received(pipe.peer(last), device, tag)
    return total, posted


def _received(peer: Peer, device: Device, tag: int) -> Tensor | None:
    (gradient,) = cast("Gradients", parcel.receive(peer, device, tag))
    return gradient


def _added(
    total: Tensor | None, layers: Sequence[int], gradients: Mapping[int, Sequence[Tensor]]
) -> Tensor | None:
    for gradient in (each for layer in layers for each in gradients.get(layer, ())):
        total = gradient if total is None else total + gradient
    return total
