"""When an action may run: the only rule."""

from gpipe.schedule.action import Action, Kind
from gpipe.schedule.schedule import Schedule

__all__ = ["predecessors"]


def predecessors(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """The actions that must be done before `action` may run, its row's order apart.

    A forward needs the forward of the stage before it. A recompute needs its own forward only:
    it can run while the gradient is still on its way. A backward needs the gradient, which is the
    backward of the stage behind it, and its activations: from its recompute where the schedule
    has one, else from its forward.

    Args:
        action: Any action of the schedule.
        schedule: Says how many stages there are and what is recomputed.

    Returns:
        At most two actions.
    """
    _, stage, microbatch = action
    match action.kind:
        case Kind.FORWARD:
            return (Action(Kind.FORWARD, stage - 1, microbatch),) if stage > 0 else ()
        case Kind.RECOMPUTE:
            return (Action(Kind.FORWARD, stage, microbatch),)
        case Kind.BACKWARD:
            return _gradient(action, schedule) + _activations(action, schedule)


def _gradient(backward: Action, schedule: Schedule) -> tuple[Action, ...]:
    _, stage, microbatch = backward
    is_last = stage + 1 == schedule.num_stages  # there the gradient is that of the loss
    return () if is_last else (Action(Kind.BACKWARD, stage + 1, microbatch),)


def _activations(backward: Action, schedule: Schedule) -> tuple[Action, ...]:
    _, stage, microbatch = backward
    is_recomputed = (stage, microbatch) in schedule.recomputed
    return (Action(Kind.RECOMPUTE if is_recomputed else Kind.FORWARD, stage, microbatch),)
