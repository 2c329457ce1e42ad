"""Carries skips from stage to stage, and their gradients back."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from gpipe.execution.channel import Mailbox
from gpipe.stage.boundary import Boundary, Gradients

__all__ = ["Route", "SkipChannel"]


class Route(NamedTuple):
    """A skip that leaves its stage: its key, and the stages on both ends."""

    key: Any
    stash_stage: int
    pop_stage: int


class _Way:
    """The mailboxes of one route."""

    def __init__(self) -> None:
        self.values = Mailbox()
        self.gradients = Mailbox()


class _Ports:
    """One stage's ends of the ways; what it waits for has always been sent by then.

    A skip is stashed before the boundary that its pop stage waits for, and its gradient is there
    before that of the boundary that its stash stage waits for.
    """

    def __init__(self, ways: Mapping[Any, _Way], popped: Collection[Any]) -> None:
        self._ways = ways
        self._popped = popped

    def receive(self, microbatch: int) -> dict[Any, Boundary]:
        return {key: self._ways[key].values.take(microbatch) for key in self._popped}

    def send(self, microbatch: int, skips: Mapping[Any, Boundary]) -> None:
        for key, skip in skips.items():
            self._ways[key].values.put(microbatch, skip)

    def receive_gradients(self, microbatch: int, keys: Collection[Any]) -> list[Gradients]:
        return [self._ways[key].gradients.take(microbatch) for key in keys]

    def send_gradients(self, microbatch: int, gradients: Mapping[Any, Gradients]) -> None:
        for key, gradient in gradients.items():
            self._ways[key].gradients.put(microbatch, gradient)


class SkipChannel:
    """The ways of all skips in one mini-batch."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self._ways = {route.key: _Way() for route in routes}

    def ports(self, stage: int) -> _Ports | None:
        """The stage's ends; None where no route begins or ends there."""
        ends = [route for route in self._routes if stage in (route.stash_stage, route.pop_stage)]
        if not ends:
            return None
        return _Ports(self._ways, [route.key for route in ends if route.pop_stage == stage])
