"""One mini-batch on its way through the stages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

from gpipe.execution.caller import CallerState
from gpipe.execution.caller_streams import CallerStreams
from gpipe.execution.channel import Aborted, Between, Channel, Mailbox
from gpipe.execution.inlet import Inlet
from gpipe.execution.interpreter import Record, Step, Steps, interpret
from gpipe.execution.link import tensors_of
from gpipe.execution.loss_head import LossHead
from gpipe.execution.out_of_memory import is_out_of_memory, memory_note
from gpipe.execution.recorder import Recorder
from gpipe.execution.skip_channel import Route, SkipChannel, SkipEnds
from gpipe.execution.threaded import ThreadedExecutor
from gpipe.schedule import Action, Kind, Schedule
from gpipe.stage.boundary import Boundary, Gradients
from gpipe.stage.device import Device, Event
from gpipe.stage.insist import insist
from gpipe.stage.joint import with_own_store, with_skips
from gpipe.stage.passage import Head
from gpipe.stage.run import MiniBatchContext, StageRun
from gpipe.stage.stage import Stage

__all__ = ["MiniBatch", "Site"]

FORWARDS = frozenset({Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION})

Rows = Sequence[Sequence[Action]]


class Site(NamedTuple):
    """Where a mini-batch runs: what of it is in this process, and how that meets the rest.

    Attributes:
        workers: Those whose rows are run here.
        between: Makes the routes between two stages.
        transfers: The steps that carry what goes to other processes and comes from there; asked
            for in the worker, at the first of them.
        drained: Told of each stage whose last backward is done, in the worker.
    """

    workers: Sequence[int]
    between: Between
    transfers: Callable[[Channel, SkipChannel], Steps] | None = None
    drained: Callable[[Stage], None] | None = None


class _Steps(dict[tuple[Any, ...], Step]):
    """Those of this process, some of which are only made when the first of them is needed."""

    later: Callable[[], Steps] | None = None

    def __missing__(self, key: tuple[Any, ...]) -> Step:
        later, self.later = self.later, None
        if later is None:
            raise KeyError(key)
        self.update(later())
        return self[key]


class MiniBatch:
    """What lives as long as one mini-batch: what is on its way, what is held, what happened.

    Args:
        stages: Those that are here, in order.
        schedule: The order of the actions, with its recomputes.
        executor: What runs them.
        context: What the runs of all stages have in common.
        site: What is in this process.
        inlet: What brings the input to the first stage, where it is not there.
        routes: The ways of the skips.
        head: The loss behind the last stage, in a step, if that is here.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        executor: ThreadedExecutor,
        context: MiniBatchContext,
        site: Site,
        *,
        inlet: Inlet | None = None,
        routes: Sequence[Route] = (),
        head: LossHead | None = None,
    ) -> None:
        self._schedule = schedule
        self._executor = executor
        self._site = site
        self._caller = CallerState()
        devices = {stage.index: stage.runs_on for stage in stages}
        self._last_device = stages[-1].runs_on
        self.streams = CallerStreams(devices.values())
        self._inlets = [each for each in (inlet, head and head.inlet) if each]
        self._channel = Channel(schedule.num_stages, site.between, inlet)
        of_worker = {worker: devices[schedule.stages_of(worker)[0]] for worker in site.workers}
        self.recorder = Recorder(of_worker, schedule.num_workers)
        self._steps = _Steps()
        self._runs: dict[int, StageRun] = {}
        skips = SkipChannel(routes, site.between)
        if site.transfers is not None:
            self._steps.later = partial(site.transfers, self._channel, skips)
        for stage in stages:
            recomputed = schedule.recomputed_in(stage.index)
            is_last = stage.index == schedule.num_stages - 1
            stage_head = _seeding(head, self._channel) if head and is_last else None
            ends = skips.ends(stage.index)
            wrap = with_skips if ends else with_own_store if stage.uses_skips else None
            leaves = not is_last and schedule.worker_of(stage.index + 1) not in site.workers
            run = StageRun(stage, context, recomputed, stage_head, wrap, sends_away=leaves)
            self._add(run, ends)

    def put_inputs(self, pieces: Sequence[Boundary]) -> None:
        """What the first stage receives for its forwards."""
        self._channel.forward[0].fill(pieces)

    def put_gradients(self, pieces: Sequence[Gradients], ready: Sequence[Event]) -> None:
        """What the last stage receives for its backwards, once these moments have passed."""
        for event in ready:
            self._last_device.compute.wait_event(event)
        self._channel.backward[-1].fill(pieces)

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
        """Run the forwards of each row, and what carries their results."""
        self._run([[each for each in row if each[0] in FORWARDS] for row in self._schedule.rows])

    def run_drain(self) -> None:
        """Run what `run_forwards` has left."""
        drain = [[each for each in row if each[0] not in FORWARDS] for row in self._schedule.rows]
        self._run(drain)

    def _add(self, run: StageRun, ends: SkipEnds | None) -> None:
        performers: dict[Kind, Callable[[int, Any], Any]] = {
            Kind.FORWARD: ends.around_forward(run.forward) if ends else run.forward,
            Kind.RECOMPUTE: run.recompute,
            Kind.BACKWARD: self._caller.without_autocast(
                ends.around_backward(run.backward) if ends else run.backward
            ),
        }
        drained = self._site.drained and partial(self._site.drained, run.stage)
        if drained is not None or run.stage.is_sharded:
            performers[Kind.BACKWARD] = _counted(
                performers[Kind.BACKWARD],
                self._schedule.num_microbatches,
                run.stage.announce_backward,
                drained,
            )
        stage, channel = run.stage.index, self._channel
        self._runs[stage] = run
        for kind, perform in performers.items():
            source, target = channel.source(kind, stage), channel.target(kind, stage)
            self._steps[kind, stage] = Step(source, perform, target)

    def _take_all(self, mailbox: Mailbox) -> list[Any]:
        taken = [mailbox.take(microbatch) for microbatch in range(self._schedule.num_microbatches)]
        for payload in taken:
            self.streams.retain(tensors_of(payload))
        return taken

    def _run(self, rows: Rows) -> None:
        recorder = self.recorder
        tasks = [
            partial(self._work, recorder.devices[worker], rows[worker], recorder.rows[worker])
            for worker in self._site.workers
        ]
        with self._between_streams():
            try:
                self._executor.run(tasks, self._caller, self._channel.abort)
            finally:
                self._caller.drop_casts()

    def _work(self, device: Device, row: Sequence[Action], records: list[Record]) -> None:
        with ExitStack() as stack:
            # A layer may move its result to another device by itself.
            for each in (*self._others(device), device):
                stack.enter_context(each.on(each.compute))
            interpret(row, self._steps, self._channel, records, device.moment, self._explain)

    def _others(self, device: Device) -> list[Device]:
        every = dict.fromkeys(self.recorder.devices.values())
        return [each for each in every if each is not device]

    def _explain(self, action: Action, error: BaseException, is_done: bool) -> None:
        """Say where the error belongs, if only this knows, and what would help."""
        if isinstance(error, Aborted):
            return
        kind, stage, microbatch = action[:3]
        if is_done:  # what is sent takes memory where it arrives
            place = self._runs[stage].stage
            sending = f"sending the result of its {kind.name.lower()}"
            error.add_note(place.place(place.layer_range, microbatch, sending))
            stage += 1 if kind is Kind.FORWARD else -1
        if is_out_of_memory(error) and stage in self._runs:
            with suppress(Exception):  # it must not take the place of the error
                error.add_note(memory_note(self._runs[stage], action))

    @contextmanager
    def _between_streams(self) -> Iterator[None]:
        """Order the stages' streams between what the caller did before and does afterwards."""
        self.streams.fork()
        ends = [self.streams.join, *(inlet.finish for inlet in self._inlets)]
        has_failed = True
        try:
            yield
            has_failed = False
        finally:
            # A device in a bad state must not hide what has brought it there.
            with suppress(Exception) if has_failed else nullcontext():
                insist(ends)


def _counted(
    perform: Callable[[int, Any], Any],
    num_calls: int,
    announce: Callable[..., None],
    finished: Callable[[], None] | None,
) -> Callable[[int, Any], Any]:
    """The same, which says before each call whether it is the last, and is then followed."""
    left = num_calls

    def counted(microbatch: int, received: Any) -> Any:
        nonlocal left
        left -= 1
        announce(is_last=left == 0)
        result = perform(microbatch, received)
        if left == 0 and finished is not None:
            finished()
        return result

    return counted


def _seeding(head: LossHead, channel: Channel) -> Head:
    """The head, which also lets the gradient of each loss enter the last stage."""

    # It must not refer to the mini-batch: in a circle, what a failure leaves would live on.
    def take_loss(microbatch: int, output: Any) -> Boundary:
        loss = head(microbatch, output)
        channel.backward[-1].put(microbatch, head.gradients(microbatch))
        return loss

    return take_loss
