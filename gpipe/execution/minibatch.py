"""One mini-batch on its way through the stages."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import dropwhile, takewhile
from typing import Any

from gpipe.execution.caller import CallerState
from gpipe.execution.channel import Channel, Mailbox
from gpipe.execution.interpreter import interpret
from gpipe.execution.loss_head import LossHead
from gpipe.execution.threaded import ThreadedExecutor
from gpipe.schedule import Action, Kind, Schedule
from gpipe.stage.boundary import Boundary, Gradients
from gpipe.stage.run import Head, StageRun
from gpipe.stage.stage import Stage
from gpipe.timeline import Event, Timeline

__all__ = ["MiniBatch"]

Rows = Sequence[Sequence[Action]]


class MiniBatch:
    """What lives as long as one mini-batch: what is on its way, what is held, what happened.

    Args:
        stages: All stages, in order.
        schedule: The order of the actions, with its recomputes.
        executor: What runs them.
        keeps_graph: Whether backwards will be run.
        head: The loss behind the last stage, in a step.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        executor: ThreadedExecutor,
        *,
        keeps_graph: bool,
        head: LossHead | None = None,
    ) -> None:
        self._schedule = schedule
        self._executor = executor
        self._caller = CallerState()
        self._channel = Channel(len(stages))
        self._events: list[list[Event]] = [[] for _ in schedule.rows]
        self._performers: dict[tuple[Kind, int], Callable[[int, Any], Any]] = {}
        for stage in stages:
            recomputed = {m for s, m in schedule.recomputed if s == stage.index}
            is_last = stage.index == len(stages) - 1
            stage_head = self._seeding(head) if head and is_last else None
            self._add(
                StageRun(stage, keeps_graph=keeps_graph, recomputed=recomputed, head=stage_head)
            )

    def put_input(self, microbatch: int, inputs: Boundary) -> None:
        """What the first stage receives for its forward."""
        self._channel.forward[0].put(microbatch, inputs)

    def put_gradients(self, microbatch: int, gradients: Gradients) -> None:
        """What the last stage receives for its backward."""
        self._channel.backward[-1].put(microbatch, gradients)

    def take_outputs(self) -> list[Boundary]:
        """What has left the last stage, for each micro-batch."""
        return self._take_all(self._channel.forward[-1])

    def take_input_gradients(self) -> list[Gradients]:
        """What has left the first stage, backward, for each micro-batch."""
        return self._take_all(self._channel.backward[0])

    def run(self) -> None:
        """Run all actions."""
        self._run(self._schedule.rows)

    def run_forwards(self) -> None:
        """Run what stands in each row before its first recompute or backward."""
        self._run([list(takewhile(_is_forward, row)) for row in self._schedule.rows])

    def run_drain(self) -> None:
        """Run what `run_forwards` has left."""
        self._run([list(dropwhile(_is_forward, row)) for row in self._schedule.rows])

    def timeline(self) -> Timeline:
        """When each action ran, in seconds since the start of the first."""
        events = [event for row in self._events for event in row]
        start_s = min((event.start_s for event in events), default=0.0)
        shifted = (
            event._replace(start_s=event.start_s - start_s, end_s=event.end_s - start_s)
            for event in events
        )
        return Timeline(tuple(shifted), len(self._events))

    def _seeding(self, head: LossHead) -> Head:
        def take_loss(microbatch: int, output: Any) -> Boundary:
            loss = head(microbatch, output)
            self.put_gradients(microbatch, head.gradients(microbatch))
            return loss

        return take_loss

    def _add(self, run: StageRun) -> None:
        stage = run.stage.index
        self._performers[Kind.FORWARD, stage] = run.forward
        self._performers[Kind.RECOMPUTE, stage] = run.recompute
        self._performers[Kind.BACKWARD, stage] = self._caller.without_autocast(run.backward)

    def _take_all(self, mailbox: Mailbox) -> list[Any]:
        return [mailbox.take(microbatch) for microbatch in range(self._schedule.num_microbatches)]

    def _run(self, rows: Rows) -> None:
        tasks = [
            partial(interpret, worker, row, self._performers, self._channel, self._events[worker])
            for worker, row in enumerate(rows)
        ]
        self._executor.run(tasks, self._caller, self._channel.abort)


def _is_forward(action: Action) -> bool:
    return action.kind is Kind.FORWARD
