"""When an action may run: the only rule."""

from gpipe.schedule.action import Action, Kind, Transfer
from gpipe.schedule.schedule import Schedule

__all__ = ["predecessors"]


def predecessors(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """The actions that must be done before `action` may run, its row's order apart.

    A forward needs the activations of the stage before it, and those that skips bring. A recompute
    needs its own forward only: it can run while the gradient is still on its way. A backward needs
    the gradients of the stages that its forward has fed, and its activations: from its recompute
    where the schedule has one, else from its forward.

    What another stage has made is there when that stage has made it; in a schedule with transfers,
    where it comes from another worker, when it was received. A receive needs its send, a send what
    it sends.

    Args:
        action: Any action of the schedule. Its micro-batch matters in one way only: whether it is
            recomputed.
        schedule: Says how many stages there are, where they live, and what is recomputed.

    Returns:
        At most two actions, and one more for each skip.
    """
    kind, stage, microbatch = action[:3]
    match kind:
        case Kind.FORWARD:
            return _activations(action, schedule)
        case Kind.RECOMPUTE | Kind.SEND_ACTIVATION:
            return (Action(Kind.FORWARD, stage, microbatch),)
        case Kind.BACKWARD:
            return _gradients(action, schedule) + _own_activations(action, schedule)
        case Kind.SEND_GRADIENT:
            return (Action(Kind.BACKWARD, stage, microbatch),)
    assert isinstance(action, Transfer), "what is left are the receives"
    return (action.partner,)


def _activations(forward: Action, schedule: Schedule) -> tuple[Action, ...]:
    stage = forward.stage
    before = [stage - 1] if stage > 0 else []
    stashes = sorted(stash for stash, pop in schedule.skips if pop == stage)
    return _arrivals(forward, Kind.RECEIVE_ACTIVATION, before + stashes, schedule)


def _gradients(backward: Action, schedule: Schedule) -> tuple[Action, ...]:
    stage = backward.stage
    is_last = stage + 1 == schedule.num_stages  # there the gradient is that of the loss
    behind = [] if is_last else [stage + 1]
    pops = sorted(pop for stash, pop in schedule.skips if stash == stage)
    return _arrivals(backward, Kind.RECEIVE_GRADIENT, behind + pops, schedule)


def _arrivals(
    action: Action, receive: Kind, sources: list[int], schedule: Schedule
) -> tuple[Action, ...]:
    """How `action` gets what the same kind of action has made in other stages."""
    kind, stage, microbatch = action
    return tuple(
        Transfer(receive, stage, microbatch, source)
        if schedule.has_transfers and schedule.are_apart(source, stage)
        else Action(kind, source, microbatch)
        for source in sources
    )


def _own_activations(backward: Action, schedule: Schedule) -> tuple[Action, ...]:
    _, stage, microbatch = backward
    is_recomputed = microbatch in schedule.recomputed_in(stage)
    return (Action(Kind.RECOMPUTE if is_recomputed else Kind.FORWARD, stage, microbatch),)
