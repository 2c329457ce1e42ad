"""Lays the wires from the stages of this process to those of others, for one mini-batch."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

from gpipe.execution.ahead import Ahead, posted_together
from gpipe.execution.channel import Channel, Mailbox
from gpipe.execution.interpreter import Step, Steps
from gpipe.execution.pipe import Pipe
from gpipe.execution.skip_channel import SkipChannel
from gpipe.execution.wire import Awaited, Forms, Waiting, Wire
from gpipe.schedule import Kind, Schedule
from gpipe.stage.device import Device, Traffic

__all__ = ["Wiring"]


class _Way(NamedTuple):
    """From a stage to a later one: what goes there, and what comes back."""

    source: int
    target: int
    down: list[Mailbox]
    up: list[Mailbox]


class Wiring:
    """The wires of one mini-batch.

    Args:
        pipe: The processes.
        device: That of the stages which are here.
        schedule: Says where each stage is.
        waiting: Around each wait, called with what is waited for.
        has_backward: Whether each activation is answered by a gradient.
    """

    def __init__(
        self,
        pipe: Pipe,
        device: Device,
        schedule: Schedule,
        waiting: Waiting,
        *,
        has_backward: bool,
    ) -> None:
        self._pipe = pipe
        self._device = device
        self._schedule = schedule
        self._forms: Forms = {}
        self._waiting = waiting
        self._has_backward = has_backward
        row = schedule.rows[pipe.worker]
        kinds = Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT
        self._ahead = {kind: Ahead(row, kind) for kind in kinds}
        self._wires: list[Wire] = []

    def between(self, source: int, target: int, traffic: Traffic, *, leads: bool) -> Mailbox:
        """A route between two stages: into this process it begins at a wire."""
        del traffic, leads  # all stages of a process are on one device
        return Awaited() if self._is_here(target) and not self._is_here(source) else Mailbox()

    def transfers(self, channel: Channel, skips: SkipChannel, forms: Forms) -> Steps:
        """The steps of all transfers in the row of this worker.

        Args:
            channel: What goes from stage to stage.
            skips: What goes past stages.
            forms: What is known of how it looks.
        """
        self._forms = forms
        lines = count()
        steps: dict[tuple[object, ...], Step] = {}
        for source, target, down, up in _ways(channel, skips, self._schedule):
            # Both ends count all lines, those that are none of their own included.
            numbered = [[(next(lines), each) for each in mailboxes] for mailboxes in (down, up)]
            if self._is_here(source) != self._is_here(target):
                steps.update(self._steps(source, target, *numbered))
        return steps

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for wire in self._wires:
            wire.finish()

    def _steps(
        self,
        source: int,
        target: int,
        down: Sequence[tuple[int, Mailbox]],
        up: Sequence[tuple[int, Mailbox]],
    ) -> Iterator[tuple[tuple[object, ...], Step]]:
        if self._is_here(source):
            sending = self._wire(f"A{source}>{target}", target, Traffic.ACTIVATIONS, down)
            answers = self._wire(f"G{source}<{target}", target, Traffic.GRADIENTS, up)
            send = sending.send if self._has_backward else sending.send_unanswered
            yield (Kind.SEND_ACTIVATION, source, target), Step(send)
            yield self._receiving(answers, Kind.RECEIVE_GRADIENT, source, target, sending)
        else:
            arriving = self._wire(f"A{target}<{source}", source, Traffic.ACTIVATIONS, down)
            answering = self._wire(f"G{target}>{source}", source, Traffic.GRADIENTS, up)
            yield self._receiving(arriving, Kind.RECEIVE_ACTIVATION, target, source)
            yield (Kind.SEND_GRADIENT, target, source), Step(answering.send_unanswered)

    def _wire(
        self, name: str, stage: int, traffic: Traffic, lines: Sequence[tuple[int, Mailbox]]
    ) -> Wire:
        peer = self._pipe.peer(self._schedule.worker_of(stage), traffic)
        num_microbatches = self._schedule.num_microbatches
        wire = Wire(
            name, peer, self._device, lines, num_microbatches, self._forms, self._waiting, {}
        )
        self._wires.append(wire)
        return wire

    def _receiving(
        self, wire: Wire, kind: Kind, stage: int, peer: int, answers: Wire | None = None
    ) -> tuple[tuple[object, ...], Step]:
        """The step that receives, ahead of its turn where that is of use."""
        ahead = self._ahead[kind]
        # An accelerator's backend does one thing after the other: sends would queue behind what is
        # received ahead.
        is_ahead = wire.knows_all_forms() and not self._device.is_asynchronous
        if is_ahead:
            together = self._together(kind, stage, peer)
            wire = wire._replace(together=together, landed=None if together else ahead.landed)
        at_once = partial(wire.receive, answers=answers)
        receive = at_once if wire.landed is None else ahead.join(stage, peer, at_once)
        return (kind, stage, peer), Step(receive)

    def _together(self, kind: Kind, stage: int, peer: int) -> Mapping[int, Sequence[int]]:
        # Where nothing is held, all that were posted would be more than the peak.
        row = self._schedule.rows[self._pipe.worker]
        return posted_together(row, kind, stage, peer) if self._has_backward else {}

    def _is_here(self, stage: int) -> bool:
        return self._schedule.worker_of(stage) == self._pipe.worker


def _ways(channel: Channel, skips: SkipChannel, schedule: Schedule) -> Iterator[_Way]:
    """From each stage to the next, with the skips that go there; then those that go further."""
    pairs = [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]
    far = {route[1:] for route in skips.routes}
    for source, target in dict.fromkeys([*pairs, *sorted(far)]):
        routes = [each for each in skips.routes if each[1:] == (source, target)]
        ways = [skips.ways[route.key] for route in routes]
        down = [way.values for way in ways]
        up = [way.gradients for way in ways]
        if target == source + 1:
            down.insert(0, channel.forward[target])
            up.insert(0, channel.backward[target])
        yield _Way(source, target, down, up)
