"""Which receives are posted ahead of their turn."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate

from gpipe.schedule import Action, Kind, Transfer

__all__ = ["Ahead", "posted_together"]

_CHANGE = {Kind.FORWARD: 1, Kind.BACKWARD: -1}
_NEEDER = {Kind.RECEIVE_ACTIVATION: Kind.FORWARD, Kind.RECEIVE_GRADIENT: Kind.BACKWARD}

_Way = tuple[int, int]
"""The stage that receives, and the one from which it does."""

Post = Callable[[int], None]
"""Posts the receive of a micro-batch."""


class Ahead:
    """Posts the receives of one kind in the order of a row, one ahead of those whose turn it was.

    A receive that is posted at its own turn only is late: what it asks for may lie ready at the
    other end, and is sent once the asking has arrived there. So the next one is posted whenever
    another has landed: between two neighbours then one is outstanding at a time.

    Args:
        row: That of the worker which receives.
        kind: That of the receives.
    """

    def __init__(self, row: tuple[Action, ...], kind: Kind) -> None:
        self._in_order = _receives(row, kind)
        self._posts: dict[_Way, Post] = {}
        self._left: deque[tuple[_Way, int]] | None = None
        self._early: tuple[_Way, int] | None = None

    def join(self, stage: int, peer: int, post: Post) -> Post:
        """What is to be called at the turn of a receive of this stage, instead of `post`."""
        self._posts[stage, peer] = post
        return partial(self._turn, (stage, peer))

    def landed(self) -> None:
        """One of them has been waited for."""
        if self._left and self._early is None:
            self._early = self._post_next(self._left)

    def _turn(self, way: _Way, microbatch: int) -> None:
        if self._left is None:  # all have joined
            self._left = deque(each for each in self._in_order if each[0] in self._posts)
        if self._early == (way, microbatch):
            self._early = None
        elif self._left and self._left[0] == (way, microbatch):
            self._post_next(self._left)

    def _post_next(self, left: deque[tuple[_Way, int]]) -> tuple[_Way, int]:
        way, microbatch = left.popleft()
        self._posts[way](microbatch)
        return way, microbatch


@lru_cache(maxsize=256)  # the rows of a model are the same in every mini-batch
def posted_together(
    row: tuple[Action, ...], kind: Kind, stage: int, peer: int
) -> Mapping[int, Sequence[int]]:
    """The micro-batches whose receives are posted when the row comes to one of them.

    A thread of gloo and the caller exclude each other from a connection, and the former spins
    meanwhile. Receives that are posted one by one, while what the last one asked for comes in,
    thus cost more than all else that a small stage does. Where the stage holds the whole
    mini-batch at its peak, as in fill-drain, many can be posted and never take more memory than
    that peak and one payload.

    Args:
        row: That of the worker which receives.
        kind: That of the receives.
        stage: Which stage receives.
        peer: From which one.

    Returns:
        By the micro-batch of the receive, some of which have none; nothing where that is not so.
    """
    actions = [action for action in row if action[1] == stage]
    order = [each[2] for each in actions if _is_of(each, kind, peer)]
    levels = list(accumulate(_CHANGE.get(action[0], 0) for action in actions))
    peak = max(levels, default=0)
    if peak < len(order):
        return {}
    if kind is Kind.RECEIVE_GRADIENT:  # a forward to come needs room, too, until they are needed
        levels = [*accumulate(reversed(levels), max)][::-1]
    found: dict[int, Sequence[int]] = {}
    num_posted = num_needed = 0
    for action, held in zip(actions, levels, strict=True):
        if action[0] is _NEEDER[kind]:
            num_needed += 1
        elif _is_of(action, kind, peer):
            end = num_posted
            if num_posted == len(found):
                end = max(num_posted + 1, num_needed + peak - held + 1)
            found[action[2]] = order[num_posted:end]
            num_posted = min(end, len(order))
    return found


def _is_of(action: Action, kind: Kind, peer: int) -> bool:
    return action[0] is kind and isinstance(action, Transfer) and action.peer == peer


@lru_cache(maxsize=256)
def _receives(row: tuple[Action, ...], kind: Kind) -> Sequence[tuple[_Way, int]]:
    """Those of a row in their order, each with its micro-batch."""
    transfers = [each for each in row if each[0] is kind and isinstance(each, Transfer)]
    return [((each.stage, each.peer), each.microbatch) for each in transfers]
