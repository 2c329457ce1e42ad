"""Drives one worker's part of each mini-batch, beside the processes of the others."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from time import perf_counter, time
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import Parameter

from gpipe.execution import parcel
from gpipe.execution.channel import Channel
from gpipe.execution.closing import Closing
from gpipe.execution.company import Company
from gpipe.execution.engine import Engine
from gpipe.execution.exchange import FLOATS, WHOLE, Exchange
from gpipe.execution.facts import Ended, Size, Totals
from gpipe.execution.harvest import Harvest
from gpipe.execution.interpreter import Steps
from gpipe.execution.loss_head import LossHead
from gpipe.execution.minibatch import Site
from gpipe.execution.peer import wait_for
from gpipe.execution.pipe import Pipe, gathered
from gpipe.execution.recorder import Recorder
from gpipe.execution.relay import Tie
from gpipe.execution.replica_parts import Part, frozen_sum, require_alike
from gpipe.execution.replicas import Replicas
from gpipe.execution.settlement import Settlement
from gpipe.execution.skip_channel import Route, SkipChannel
from gpipe.execution.total_norm import Counted, total_norm
from gpipe.execution.waiter import Waiter
from gpipe.execution.wire import Forms
from gpipe.execution.wiring import Wiring
from gpipe.execution.word import Word, Words
from gpipe.schedule import Schedule
from gpipe.stage.alias import Aliases
from gpipe.stage.batchnorm import DeferredBatchNorm
from gpipe.stage.boundary import Boundary
from gpipe.stage.device import HOST
from gpipe.stage.gradients import Retain
from gpipe.stage.microbatch import Batch
from gpipe.stage.moments import Moments
from gpipe.stage.randomness import Randomness, key_ahead
from gpipe.stage.run import MiniBatchContext
from gpipe.stage.stage import Stage
from gpipe.timeline import Event, Timeline

__all__ = ["DistributedEngine", "PipeEnds"]

_END = "the end of the mini-batch on other ranks"
_TAG = 2**30 - 2  # above those of wires, below those of ties


class PipeEnds(NamedTuple):
    """The workers of the first and of the last stage."""

    first: int
    last: int


class DistributedEngine(Engine):
    """Runs the row of one worker of each mini-batch; other processes run the others.

    Args:
        stages: Those of this worker.
        pipe: The processes.
        ends: Where the model begins and ends.
        routes: The skips between stages.
        norms: The layers of deferred batch normalisation which are here.
        ties: The parameters that several workers have.
        company: All processes, which end together.
        counts_alike: Whether all replicas must have as many micro-batches.
        shares_moments: Whether norms take in what all replicas have seen.
        replicas: The processes that have the same stages of other replicas.
        dynamic_shapes: Whether boundaries may look otherwise though the input looks the same.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        pipe: Pipe,
        ends: PipeEnds,
        routes: Sequence[Route] = (),
        norms: Sequence[DeferredBatchNorm] = (),
        ties: Sequence[Tie] = (),
        *,
        replicas: Replicas,
        company: Company,
        counts_alike: bool = False,
        shares_moments: bool = False,
        dynamic_shapes: bool = False,
    ) -> None:
        self._waiter = Waiter(f"worker {pipe.worker}")
        super().__init__(stages, self._waiter.executor, routes, norms)
        self.pipe = pipe
        self._ends = ends
        self._ties = ties
        self._replicas = replicas
        self._company = company
        self._counts_alike = counts_alike
        company.join(self._waiter)
        if shares_moments and pipe.num_replicas > 1:
            self._share = self._moments_of_replicas
        # The first worker begins while its word goes round, so it must not be the host of that; at
        # the end it is the last that is done, mostly.
        far = ends.last if ends.last != ends.first else (ends.first + 1) % pipe.num_workers
        self._first_words = Exchange(pipe, far, WHOLE)
        self._last_words = Exchange(pipe, ends.first, FLOATS, 1)
        self._words = Words(dynamic_shapes)
        self._word: Word | None = None
        self._hears_later = False
        self._closing: Closing | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the own turn; what fails meanwhile fails on all ranks.

        Raises:
            StageError: Another rank has failed.
        """
        with super().turn(), self._company.sharing_failures():
            yield

    def close(self) -> None:
        """Give back the process groups; all ranks do."""
        self._replicas.close()
        self.pipe.close()

    def agree(self, batch: Batch | None, size: Size) -> Size:
        """The size of the next mini-batch, as the first worker knows it; all workers ask.

        Args:
            batch: The input; None where the first stage is not here.
            size: As far as this process knows it.
        """
        look, key = (0, 0) if batch is None else (self._words.look_of(batch), key_ahead())
        state = hash(tuple([stage.state_hash() for stage in self.stages]))
        self._word = Word(look, *size, key, (state,))
        # The first worker knows its size, and begins while its word is on its way.
        knows_size = batch is not None and self.pipe.replicas_control is None
        self._hears_later = knows_size and self.pipe.num_workers > 1
        if self._hears_later:
            self._word.tell(self._first_words)
        else:
            self._waiter.run(partial(self._introduce, self._word), "the next mini-batch")
        return self._word.size

    def _introduce(self, mine: Word) -> None:
        mine._replace(total_rows=self._total_rows(mine.size)).tell(self._first_words)
        self._word = Word.heard(self._ends.first, self._first_words)

    def _known_forms(self) -> Forms:
        """How payloads look; waits for the word of the others where that has not come."""
        if self._hears_later:
            with self._waiter.waiting("the next mini-batch"):
                self._word = Word.heard(self._ends.first, self._first_words)
        assert self._word is not None
        return self._words.forms(self._word)

    def broadcast(self, output: Boundary | None) -> Boundary:
        """The output of the last stage, on all workers."""
        device, source = self.stages[0].runs_on, self._ends.last
        given = output

        def share() -> None:
            nonlocal given
            if given is None:
                given = cast("Boundary", parcel.receive(self.pipe.peer(source), device, _TAG))
                return
            others = [each for each in range(self.pipe.num_workers) if each != source]
            sent = [parcel.send(given, self.pipe.peer(each), device, _TAG) for each in others]
            wait_for(chain.from_iterable(sent))

        self._waiter.run(share, "the output")
        assert given is not None
        return given

    def gather_timeline(self, recorder: Recorder) -> Timeline:
        """The actions of all workers in one timeline; all of them ask for it."""
        # Hosts share the time of day only; processes of one host thus have one clock.
        shift_s = time() - perf_counter()
        mine = [
            (worker, action, start_s + shift_s, end_s + shift_s)
            for worker, action, start_s, end_s in recorder.events
        ]
        every: list[list[Any]] = [[] for _ in range(self.pipe.num_workers)]
        with self.turn():
            gather = partial(dist.all_gather_object, every, mine, self.pipe.control)
            self._waiter.run(gather, "the timelines of other ranks")
        return recorder.timeline_of([Event(*each) for row in every for each in row])

    def total_norm(self, norm_type: float) -> Tensor:
        """That of the gradients of all workers together; all of them ask for it."""
        found = torch.empty(0)

        def gather() -> None:
            nonlocal found
            device = self.stages[0].device
            found = total_norm(list(self._counted()), norm_type, self.pipe.control, device)

        with self.turn():
            self._waiter.run(gather, "the norms of other ranks")
        return found

    def _counted(self) -> Iterator[Counted]:
        """The gradients that are here, but for those of parameters that are counted elsewhere."""
        seen = {tie.parameter for tie in self._ties if tie.workers[0] != self.pipe.worker}
        for stage in self.stages:
            for index, layer in enumerate(stage, stage.first_layer):
                for position, parameter in enumerate(layer.parameters()):
                    if parameter.grad is not None and parameter not in seen:
                        yield Counted(index, position, parameter.grad)
                    seen.add(parameter)

    def _total_rows(self, size: Size) -> int:
        """Those of all replicas, where this worker knows its own; all workers ask."""
        if self.pipe.replicas_control is None:
            return size.rows
        mine = Part(size.rows, size.num_microbatches, frozen_sum(self.stages))
        every = gathered(mine, self.pipe.replicas_control)
        parts = [Part(*map(int, part)) for part in every]
        require_alike(parts, self.pipe.worker, counts_alike=self._counts_alike)
        return sum(part.rows for part in parts)

    def _randomness(self) -> Randomness:
        assert self._word is not None
        devices = (stage.runs_on for stage in self.stages)
        return Randomness(devices, (self._word.key, self.pipe.replica))

    def _site(
        self,
        schedule: Schedule,
        context: MiniBatchContext,
        head: LossHead | None,
        aliases: Sequence[Aliases],
    ) -> Site:
        wiring = Wiring(
            self.pipe,
            self.stages[0].runs_on,
            schedule,
            self._waiter.waiting,
            has_backward=context.keeps_graph,
        )
        harvest = self._harvest(aliases) if context.keeps_graph else None
        settlement = Settlement(self.pipe, self._last_words, head, self.stages[-1].device)
        self._closing = Closing(wiring, settlement, context.randomness, harvest)

        def transfers(channel: Channel, skips: SkipChannel) -> Steps:
            return wiring.transfers(channel, skips, self._known_forms())

        drained = None if harvest is None else harvest.take_from
        return Site((self.pipe.worker,), wiring.between, transfers, drained)

    def _harvest(self, aliases: Sequence[Aliases]) -> Harvest:
        of_loss = aliases[len(self._aliases) :]
        return Harvest(self.stages, of_loss, self._ties, self.pipe, self._replicas.begin())

    def _moments_of_replicas(self, moments: list[Moments]) -> list[list[Moments]]:
        device = self.stages[0].device
        every: list[list[Moments]] = [[] for _ in range(self.pipe.num_replicas)]
        mine = [each.to(HOST) for each in moments]
        group = self.pipe.replicas_control
        gather = partial(dist.all_gather_object, every, mine, group)
        self._waiter.run(gather, "the statistics of other replicas")
        return [[each.to(device) for each in row] for row in every]

    def _driven(self, drive: Callable[[], Ended]) -> Ended:
        device = self.stages[0].runs_on
        stream = device.current_stream()

        def in_worker() -> Ended:
            try:
                with device.on(stream):
                    return drive()
            finally:
                self._closing = None

        return self._waiter.call(in_worker)

    def _take(self, _: Sequence[Aliases], __: Retain) -> dict[Parameter, Tensor]:
        assert self._closing is not None
        with self._waiter.waiting(_END):
            return self._closing.take()

    def _totals(self, context: MiniBatchContext, head: LossHead | None) -> Totals:
        assert self._closing is not None
        with self._waiter.waiting(_END):
            totals = self._closing.totals()
        context.randomness.pay()
        return totals
