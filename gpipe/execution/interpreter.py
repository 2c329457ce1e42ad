"""Carries out one row of a schedule, action by action."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from gpipe.execution.channel import Aborted, Channel
from gpipe.schedule import Action

__all__ = ["Record", "Step", "Steps", "interpret"]

Record = tuple[Action, Any, Any]
"""An action with the moments of its start and its end."""


class Step(NamedTuple):
    """How a kind of action is done on a stage.

    Attributes:
        receive: Waits for the input of a micro-batch; of a transfer it is all that is done.
        perform: Does the work: (micro-batch, received) -> what is sent, or None for nothing.
        send: Passes the result on.
    """

    receive: Callable[[int], Any]
    perform: Callable[[int, Any], Any] | None = None
    send: Callable[[int, Any], None] | None = None


Steps = Mapping[tuple[Any, ...], Step]
"""By kind and stage, and the stage at the other end of a transfer."""


def interpret(
    row: Sequence[Action],
    steps: Steps,
    channel: Channel,
    records: list[Record],
    moment: Callable[[], Any] = perf_counter,
    explain: Callable[[Action, BaseException, bool], None] | None = None,
) -> None:
    """Receive, perform and send for each action in turn; of tensors it knows nothing.

    Args:
        row: The actions, in the order in which they are done.
        steps: How each of them is done.
        channel: Knows whether another worker has failed.
        records: Gets each action with its moments, waiting excluded.
        moment: What tells the moment.
        explain: Called when an action has failed, before its exception goes on, and told whether
            the action itself was done and its result was to be sent.

    Raises:
        Aborted: Another worker has failed.
    """
    action, is_done = None, False
    try:
        for action in row:
            if channel.aborted:
                raise Aborted
            is_done = False
            microbatch = action[2]
            receive, perform, send = steps[action[:2] + action[3:]]
            received = receive(microbatch)
            if perform is None or send is None:
                continue
            start = moment()
            result = perform(microbatch, received)
            records.append((action, start, moment()))
            is_done = True
            if result is not None:
                send(microbatch, result)
            # While this worker waits for its next action it must not keep the last one's tensors
            # alive.
            del received, result
    except BaseException as error:
        if action is not None and explain is not None:
            explain(action, error, is_done)
        raise
