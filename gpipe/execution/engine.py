"""Drives mini-batches through the stages, one after the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock

import torch
from torch import Tensor
from torch.nn import Parameter

from gpipe.execution.channel import between_devices
from gpipe.execution.facts import Ended, Size, Totals
from gpipe.execution.gate import hand_over_to, join
from gpipe.execution.inlet import inlet_of, near
from gpipe.execution.loss_head import LossHead
from gpipe.execution.minibatch import MiniBatch, Site
from gpipe.execution.skip_channel import Route
from gpipe.execution.threaded import ThreadedExecutor, is_of_autograd
from gpipe.schedule import Schedule
from gpipe.stage import microbatch
from gpipe.stage.alias import Aliases
from gpipe.stage.batchnorm import Collector, DeferredBatchNorm, Share
from gpipe.stage.boundary import Boundary, Gradients
from gpipe.stage.device import HOST, Event
from gpipe.stage.gradients import Retain, collect_gradients, swapped_in, take_gradients
from gpipe.stage.microbatch import Batch
from gpipe.stage.randomness import GeneratorChangedError, Randomness
from gpipe.stage.run import MiniBatchContext
from gpipe.stage.stage import Stage
from gpipe.stage.unchanged import LayersThen

__all__ = ["Engine", "Names"]

Names = Mapping[Parameter, str]
"""The parameters that may get a gradient, each once, with the names that errors give them."""

NUM_FIRST_LOOKS = 2  # mini-batches, from the first, whose recomputes are looked at closely
LOOK_EVERY = 100


class Engine:
    """Runs one mini-batch after the other; a second thread waits for its turn.

    Args:
        stages: Those of this process, in order.
        executor: The workers that they are on.
        routes: The skips between stages.
        norms: The layers of deferred batch normalisation.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        executor: ThreadedExecutor,
        routes: Sequence[Route] = (),
        norms: Sequence[DeferredBatchNorm] = (),
    ) -> None:
        self.stages = tuple(stages)
        self._layers = [layer for stage in stages for layer in stage]
        self._aliases = [alias for stage in stages for alias in stage.aliases]
        self._with_copies = [alias for alias in self._aliases if alias.has_copies()]
        self._executor = executor
        self._needs_autograds_threads = any(stage.device != HOST for stage in stages)
        self._routes = tuple(routes)
        self._norms = tuple(norms)
        self._share: Share | None = None  # the norms' moments with replicas
        self._num_trained = 0
        self._lock = RLock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other thread drives a mini-batch, and keep it so.

        Raises:
            RuntimeError: A worker asks, for whom its own mini-batch would wait for ever.
        """
        if self._executor.owns_this_thread():
            raise _calls_itself()
        if not self._lock.acquire(blocking=False):
            if is_of_autograd():  # for which the backward waits that holds the lock
                raise _calls_itself()
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def agree(self, batch: Batch | None, size: Size) -> Size:
        """The size of the next mini-batch, if this process knows it, as all processes know it."""
        return size

    def evaluate(
        self, batch: Batch | None, schedule: Schedule, head: LossHead | None = None
    ) -> Ended:
        """Run the forwards only and hold nothing."""
        return self._driven(partial(self._evaluate, batch, schedule, head))

    def _driven(self, drive: Callable[[], Ended]) -> Ended:
        """What this gives, called in the thread that drives mini-batches."""
        return drive()

    @torch.no_grad()
    def _evaluate(self, batch: Batch | None, schedule: Schedule, head: LossHead | None) -> Ended:
        # A norm in training updates its statistics without gradients, too.
        context = MiniBatchContext(False, self._randomness(), self._collector())
        minibatch = self._minibatch(batch, schedule, context, head)
        with self._attending(context), swapped_in(self._with_copies):
            minibatch.run_forwards()
        totals = self._totals(context, head)
        self._commit(context, minibatch)
        if head is not None:
            minibatch.streams.retain(head.tensors())
        takes = head is None and self.stages[-1].index == schedule.num_stages - 1
        outputs = minibatch.take_outputs() if takes else []
        return Ended(outputs, totals.loss, minibatch.recorder)

    def differentiable(
        self, batch: Batch, schedule: Schedule, names: Names, output_dim: int
    ) -> Boundary:
        """Run the forwards; the output is one node to autograd, whose backward runs the rest."""
        context = self._training_context()
        minibatch = self._minibatch(batch, schedule, context, None)
        with self._attending(context), swapped_in(self._aliases):
            minibatch.run_forwards()
        context.randomness.pay()
        outputs = minibatch.take_outputs()
        whole = microbatch.join(outputs, output_dim)
        sizes = [[_size(tensor, output_dim) for tensor in output.tensors] for output in outputs]
        self._commit(context, minibatch)
        then = LayersThen(self._layers, names, recomputes=bool(schedule.recomputed))

        def drain(gradients: Gradients, ready: list[Event]) -> Gradients:
            if is_of_autograd() and self._needs_autograds_threads:
                raise _calls_itself()
            pieces = microbatch.cut_gradients(gradients, sizes, output_dim)
            minibatch.put_gradients(pieces, ready)
            run = minibatch.run_drain
            with self.turn(), then.restored():
                by_leaf = self._gradients(minibatch, run, context, batch, names, self._aliases)
                context.randomness.pay()
            # Autograd takes them up on the streams of the forward.
            minibatch.streams.meet()
            return by_leaf

        leaves = [*batch.boundary.tensors, *names]
        return Boundary(join(whole.tensors, leaves, drain), whole.structure)

    def step(
        self,
        batch: Batch | None,
        schedule: Schedule,
        head: LossHead | None,
        names: Names,
        of_loss: Sequence[Aliases] = (),
    ) -> Ended:
        """Run the whole schedule, then bring each leaf its gradient.

        Args:
            batch: The input; None where the first stage is not here.
            schedule: The order of all actions.
            head: The loss; None where the last stage is not here.
            names: The parameters of the model, and those of the loss if it has any.
            of_loss: The aliases of the latter.
        """
        return self._driven(partial(self._step, batch, schedule, head, names, of_loss))

    def _step(
        self,
        batch: Batch | None,
        schedule: Schedule,
        head: LossHead | None,
        names: Names,
        of_loss: Sequence[Aliases],
    ) -> Ended:
        context = self._training_context()
        aliases = [*self._aliases, *of_loss]
        minibatch = self._minibatch(batch, schedule, context, head, aliases)
        gradients = self._gradients(minibatch, minibatch.run, context, batch, names, aliases)
        if head is not None:
            minibatch.streams.retain(head.tensors())
        leaves = [*(batch.boundary.tensors if batch else ()), *names]
        present = [leaf for leaf, each in zip(leaves, gradients, strict=True) if each is not None]
        gradients[:] = [each for each in gradients if each is not None]
        # Made while the totals are on their way.
        hand_over = hand_over_to(present) if present else None
        totals = self._totals(context, head)
        _multiply(gradients, totals.factor)
        if context.collector is not None and self._share is None:
            context.collector.check()
        if not (present or totals.has_gradients):
            raise _no_gradient()
        if hand_over is not None:
            hand_over(gradients)
        self._commit(context, minibatch)
        return Ended([], totals.loss, minibatch.recorder)

    def _totals(self, context: MiniBatchContext, head: LossHead | None) -> Totals:
        """What is known at the end; the caller's generator moves on if a layer drew."""
        context.randomness.pay()
        if head is None:
            return Totals()
        parts = head.parts()
        return Totals(head.total(parts), head.correction(parts))

    def _training_context(self) -> MiniBatchContext:
        number, self._num_trained = self._num_trained, self._num_trained + 1
        return MiniBatchContext(
            keeps_graph=True,
            randomness=self._randomness(),
            collector=self._collector(),
            looks_closely=number < NUM_FIRST_LOOKS or number % LOOK_EVERY == 0,
        )

    def _randomness(self) -> Randomness:
        return Randomness(stage.runs_on for stage in self.stages)

    def _collector(self) -> Collector | None:
        return Collector(self._norms) if self._norms else None

    def _minibatch(
        self,
        batch: Batch | None,
        schedule: Schedule,
        context: MiniBatchContext,
        head: LossHead | None,
        aliases: Sequence[Aliases] = (),
    ) -> MiniBatch:
        first_device = self.stages[0].runs_on
        batch = batch and near(batch, first_device)
        minibatch = MiniBatch(
            self.stages,
            schedule,
            self._executor,
            context,
            self._site(schedule, context, head, aliases),
            inlet=None if batch is None else inlet_of(batch, first_device),
            routes=self._routes,
            head=head,
        )
        if batch is not None:
            minibatch.put_inputs(batch.slices(schedule.num_microbatches))
        return minibatch

    def _site(
        self,
        schedule: Schedule,
        context: MiniBatchContext,
        head: LossHead | None,
        aliases: Sequence[Aliases],
    ) -> Site:
        between = between_devices([stage.runs_on for stage in self.stages])
        return Site(range(schedule.num_workers), between)

    def _gradients(
        self,
        minibatch: MiniBatch,
        run: Callable[[], None],
        context: MiniBatchContext,
        batch: Batch | None,
        names: Names,
        aliases: Sequence[Aliases],
    ) -> Gradients:
        """Run the backwards; the gradients of the input's tensors, then of the parameters."""

        def attended() -> None:
            with self._attending(context):
                run()

        take = partial(self._take, aliases, minibatch.streams.retain)
        by_parameter = collect_gradients(aliases, names, attended, take)
        by_input: Gradients = []
        if batch is not None:
            by_input = [None] * len(batch.boundary.tensors)
            if any(tensor.requires_grad for tensor in batch.boundary.tensors):
                by_input = batch.join_gradients(minibatch.take_input_gradients())
        by_leaf = [*by_input, *(by_parameter.pop(parameter, None) for parameter in names)]
        minibatch.streams.retain(by_leaf)
        return by_leaf

    def _take(self, aliases: Sequence[Aliases], retain: Retain) -> dict[Parameter, Tensor]:
        """The gradients that the backwards have left."""
        return take_gradients(aliases, retain)

    def _commit(self, context: MiniBatchContext, minibatch: MiniBatch) -> None:
        if context.collector is not None:
            minibatch.streams.retain(context.collector.tensors())
            context.collector.commit(self._share)

    @contextmanager
    def _attending(self, context: MiniBatchContext) -> Iterator[None]:
        """See to the caller's generator, and learn which layers draw from it."""
        habits = [stage.habits() for stage in self.stages]
        try:
            with context.randomness.guarding():
                yield
        except GeneratorChangedError:
            for stage in self.stages:
                stage.forget_habits()
            raise _late_draw() from None
        for each in habits:
            each.knows_drawing = True


@torch.no_grad()
def _multiply(gradients: Gradients, factor: Tensor | None) -> None:
    """Multiply the gradients in the list by what is known only now, such as a total weight."""
    if factor is None:
        return
    devices = {gradient.device for gradient in gradients if gradient is not None}
    factors = {device: factor.to(device) for device in devices}
    for position, gradient in enumerate(gradients):
        if gradient is not None:
            # Not in place: a gradient may be another's, too, or expanded.
            gradients[position] = (gradient * factors[gradient.device]).to(gradient.dtype)


def _no_gradient() -> RuntimeError:
    return RuntimeError(
        "No gradient came out of this step: the loss depends on nothing that requires "
        "grad. Let a parameter or an input require grad, or call step() under "
        "torch.no_grad()."
    )


def _calls_itself() -> RuntimeError:
    return RuntimeError(
        "A layer, a loss or torch.utils.checkpoint has called the GPipe that runs it, which would "
        "wait for itself. Call another model there; to checkpoint, use GPipe(checkpoint='always')."
    )


def _size(tensor: Tensor, dim: int) -> int:
    return tensor.shape[dim] if tensor.dim() else 1


def _late_draw() -> RuntimeError:
    return RuntimeError(
        "Something drew from torch's default generator that had not done so in the first "
        "mini-batch: a layer that began to, or another thread. Its numbers would depend on where "
        "the model is cut, so this mini-batch is refused; gradients and generator are as before. "
        "Run it again: a layer that draws in its forward is known by then; in a backward nothing "
        "may draw."
    )
