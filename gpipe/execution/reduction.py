"""The sum of one mini-batch's gradients over all replicas."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from gpipe.execution.buckets import Bucket, sum_dtype, unite
from gpipe.execution.local_parts import local_part
from gpipe.execution.sums import Sum, Sums
from gpipe.stage.boundary import Gradients
from gpipe.stage.device import HOST, from_host

__all__ = ["LocalReduction", "Pair", "Reduction", "SummedReduction"]

Pair = tuple[Parameter, Tensor | None]
"""A parameter and its gradient; None where there is none."""


class Reduction(Protocol):
    """Takes gradients stage by stage, and gives their sums back at the end."""

    def add(self, parameters: Sequence[Parameter], gradients: Gradients) -> None:
        """Start the sum of these gradients, which are complete.

        Every replica adds the same parameters in the same order; any of them may have None for a
        gradient. The streams are current on which the gradients were made.

        Args:
            parameters: Those of a stage. One that is added twice has two sums.
            gradients: One for each. The list is emptied: each is let go when it is packed.

        Raises:
            ValueError: A gradient is not dense, or the sum would round it to another dtype. Nothing
                of this call has started then; the other replicas wait until the job is ended.
        """

    def finish(self) -> list[Pair]:
        """Wait for all sums; the calling thread's current stream comes behind them.

        Returns:
            Each parameter in the order of `add`, with its sum, or None where no replica has one.

        Raises:
            Exception: That of a sum that failed; the group is not to be used any more.
        """


class LocalReduction:
    """Every replica for itself: what is added comes back."""

    def __init__(self) -> None:
        self._pairs: list[Pair] = []

    def add(self, parameters: Sequence[Parameter], gradients: Gradients) -> None:
        """Keep these gradients; the list is emptied."""
        self._pairs.extend(zip(parameters, gradients, strict=True))
        gradients.clear()

    def finish(self) -> list[Pair]:
        """All that was added."""
        pairs, self._pairs = self._pairs, []
        return pairs


class SummedReduction:
    """In buckets, each of which is on its way as soon as it is packed.

    Args:
        sums: Makes the sums.
        bucket_bytes: See `unite`.
    """

    def __init__(self, sums: Sums, bucket_bytes: int) -> None:
        self._sums = sums
        self._bucket_bytes = bucket_bytes
        self._parameters: list[Parameter] = []
        self._is_here: list[bool] = []
        self._flights: deque[_Flight] = deque()

    @torch.no_grad()
    def add(self, parameters: Sequence[Parameter], gradients: Gradients) -> None:
        """Pack these gradients and start their sums; the list is emptied."""
        assert len(parameters) == len(gradients)
        _require_summable(parameters, gradients)
        first = len(self._parameters)
        self._parameters.extend(parameters)
        self._is_here.extend(gradient is not None for gradient in gradients)
        for places in unite(parameters, self._bucket_bytes):
            taken = [_take(gradients, place) for place in places]
            bucket = Bucket([parameters[place] for place in places], taken)
            under_way = self._sums.start(bucket.memory)
            self._flights.append(_Flight([first + each for each in places], bucket, under_way))
        gradients.clear()

    @torch.no_grad()
    def finish(self) -> list[Pair]:
        """Wait for all sums and unpack them."""
        if not self._parameters:
            return []
        device = local_part(self._parameters[0]).device
        presence = _Presence(self._is_here, self._sums, device)
        sums: Gradients = [None] * len(self._parameters)
        while self._flights:
            places, bucket, under_way = self._flights.popleft()
            under_way.wait()
            for place, total in zip(places, bucket.unpack(), strict=True):
                sums[place] = total
        triples = zip(self._parameters, sums, presence.anywhere(), strict=True)
        return [(parameter, total if is_there else None) for parameter, total, is_there in triples]


class _Flight(NamedTuple):
    """A bucket under way, with the places of its parameters in the mini-batch."""

    places: list[int]
    bucket: Bucket
    sum: Sum


class _Presence:
    """Which parameters have a gradient on some replica.

    One small sum a mini-batch, at its end, so that the drain does not wait for it.
    """

    def __init__(self, is_here: Sequence[bool], sums: Sums, device: torch.device) -> None:
        self._is_here = is_here
        self._counts = from_host(is_here, torch.empty(0, dtype=torch.int32, device=device))
        self._sum = sums.start(self._counts)

    def anywhere(self) -> Sequence[bool]:
        self._sum.wait()
        if all(self._is_here):
            return self._is_here  # others add nothing to that, so the host need not wait
        return [count > 0 for count in self._counts.to(HOST).tolist()]


def _take(gradients: Gradients, place: int) -> Tensor | None:
    taken, gradients[place] = gradients[place], None
    return taken


def _require_summable(parameters: Sequence[Parameter], gradients: Gradients) -> None:
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if gradient is None:
            continue
        name = f"The gradient of parameter {index} of a stage, of shape {tuple(parameter.shape)}, "
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"{name}is not dense, its layout is {gradient.layout}, and replicas sum dense "
                "gradients. Make it dense, such as with nn.Embedding(sparse=False), or pass "
                'all_reduce="none".'
            )
        summed_in = sum_dtype(parameter)
        if torch.promote_types(gradient.dtype, summed_in) != summed_in:
            raise ValueError(
                f"{name}is of {gradient.dtype}, and replicas would sum it in {summed_in}. Set the "
                'parameter\'s `grad_dtype` to the former, or pass all_reduce="none".'
            )
