"""Which receives are posted together, ahead of their turn."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from gpipe.schedule import Action, Kind, Transfer

__all__ = ["posted_together"]

_CHANGE = {Kind.FORWARD: 1, Kind.BACKWARD: -1}
_NEEDER = {Kind.RECEIVE_ACTIVATION: Kind.FORWARD, Kind.RECEIVE_GRADIENT: Kind.BACKWARD}


@lru_cache(maxsize=256)  # the rows of a model are the same in every mini-batch
def posted_together(
    row: tuple[Action, ...], kind: Kind, stage: int, peer: int
) -> Mapping[int, Sequence[int]]:
    """The micro-batches whose receives are posted when the row comes to one of them.

    A thread of gloo and the caller exclude each other from a connection, and the former spins
    meanwhile. Receives that are posted one by one, while what the last one asked for comes in,
    thus cost more than all else that a small stage does. Where the stage holds the whole
    mini-batch at its peak, as in fill-drain, many can be posted and never take more memory than
    that peak and one payload; elsewhere it stays at one by one.

    Args:
        row: That of the worker which receives.
        kind: That of the receives.
        stage: Which stage receives.
        peer: From which one.

    Returns:
        By the micro-batch of the receive, some of which have none; nothing for one by one.
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
