"""Carries skips from stage to stage, and their gradients back."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from gpipe.execution.channel import Between, Mailbox
from gpipe.stage.boundary import Boundary, Gradients
from gpipe.stage.device import Traffic
from gpipe.stage.joint import join_skips, part_gradients, part_skips

__all__ = ["Route", "SkipChannel", "Way"]

Forward = Callable[[int, Boundary], Boundary | None]
Backward = Callable[[int, Gradients], Gradients]


class Route(NamedTuple):
    """A skip that leaves its stage: its key, and the stages on both ends."""

    key: Any
    stash_stage: int
    pop_stage: int


class Way(NamedTuple):
    """The mailboxes of one route."""

    values: Mailbox
    gradients: Mailbox


class SkipChannel:
    """The ways of all skips in one mini-batch.

    Args:
        routes: Where they begin and end.
        between: Makes the routes between two stages.
    """

    def __init__(self, routes: Sequence[Route], between: Between) -> None:
        self.routes = routes
        self.ways = {route.key: _way(route, between) for route in routes}

    def ends(self, stage: int) -> "SkipEnds | None":
        """Those of one stage; None where no route begins or ends there."""
        if not any(stage in (route.stash_stage, route.pop_stage) for route in self.routes):
            return None
        popped = [route.key for route in self.routes if route.pop_stage == stage]
        return SkipEnds(self.ways, popped)


def _way(route: Route, between: Between) -> Way:
    _, stash, pop = route
    # Also on the streams a skip is ahead of the boundary that its reader waits for, see `SkipEnds`.
    return Way(
        between(stash, pop, Traffic.ACTIVATIONS, leads=True),
        between(pop, stash, Traffic.GRADIENTS, leads=True),
    )


class SkipEnds:
    """One stage's ends of the ways of its skips, around the actions of the stage.

    Nothing is ever waited for here: a skip is stashed before the boundary that its pop stage waits
    for, and its gradient is there before that of the boundary that its stash stage waits for.
    """

    def __init__(self, ways: Mapping[Any, Way], popped: Sequence[Any]) -> None:
        self._ways = ways
        self._popped = popped
        self._received: dict[int, Any] = {}
        self._sent: dict[int, list[Any]] = {}

    def around_forward(self, forward: Forward) -> Forward:
        """Add what is popped to what a forward gets, and send on what it has stashed."""

        def wrapped(microbatch: int, received: Boundary) -> Boundary | None:
            skips = {key: self._ways[key].values.take(microbatch) for key in self._popped}
            joint = join_skips(received, skips)
            self._received[microbatch] = joint.structure
            sent = forward(microbatch, joint)
            if sent is None:
                return None
            boundary, left = part_skips(sent)
            self._sent[microbatch] = list(left)
            for key, skip in left.items():
                self._ways[key].values.put(microbatch, skip)
            return boundary

        return wrapped

    def around_backward(self, backward: Backward) -> Backward:
        """Add the gradients of what was stashed, and send back those of what was popped."""

        def wrapped(microbatch: int, gradients: Gradients) -> Gradients:
            sent = self._sent.pop(microbatch, [])
            arrived = (self._ways[key].gradients.take(microbatch) for key in sent)
            every = [*gradients, *chain.from_iterable(arrived)]
            by_input = backward(microbatch, every)
            main, skips = part_gradients(self._received.pop(microbatch), by_input)
            for key, gradient in skips.items():
                self._ways[key].gradients.put(microbatch, gradient)
            return main

        return wrapped
