"""Drives mini-batches through the stages, one after the other."""

from collections.abc import Callable, Mapping, Sequence
from threading import RLock

import torch
from torch.nn import Parameter

from gpipe.execution.gate import hand_over, join
from gpipe.execution.loss_head import LossHead
from gpipe.execution.minibatch import MiniBatch
from gpipe.execution.threaded import ThreadedExecutor
from gpipe.schedule import Schedule
from gpipe.stage.boundary import Boundary, Gradients
from gpipe.stage.gradients import collect_gradients, swapped_in
from gpipe.stage.microbatch import cut_gradients, gather, join_gradients, scatter
from gpipe.stage.stage import Stage
from gpipe.timeline import Timeline

__all__ = ["Engine"]

Names = Mapping[Parameter, str]
"""The parameters that may get a gradient, each once, with the names that errors give them."""


class Engine:
    """Runs one mini-batch after the other; a second thread waits for its turn.

    Args:
        stages: All stages, in order.
        num_workers: How many workers they are on.
    """

    def __init__(self, stages: Sequence[Stage], num_workers: int) -> None:
        self.stages = tuple(stages)
        self._executor = ThreadedExecutor(num_workers)
        self._lock = RLock()

    def evaluate(self, inputs: Boundary, schedule: Schedule) -> Boundary:
        """Run the forwards only and hold nothing; the output."""
        return gather(self._forwards_only(inputs, schedule, None).take_outputs())

    def evaluate_loss(self, inputs: Boundary, schedule: Schedule, head: LossHead) -> None:
        """Run the forwards only and hold nothing; the head takes the outputs."""
        self._forwards_only(inputs, schedule, head)

    def differentiable(self, inputs: Boundary, schedule: Schedule, names: Names) -> Boundary:
        """Run the forwards; the output is one node to autograd, whose backward runs the rest."""
        minibatch = self._minibatch(inputs, schedule, None, keeps_graph=True)
        with self._lock, swapped_in(self.stages):
            minibatch.run_forwards()
        outputs = minibatch.take_outputs()
        whole = gather(outputs)
        num_rows = [[len(tensor) for tensor in output.tensors] for output in outputs]

        def drain(gradients: Gradients) -> Gradients:
            for microbatch, piece in enumerate(cut_gradients(gradients, num_rows)):
                minibatch.put_gradients(microbatch, piece)
            return self._gradients(minibatch, minibatch.run_drain, inputs, names)

        leaves = [*inputs.tensors, *names]
        return Boundary(join(whole.tensors, leaves, drain), whole.structure)

    def step(self, inputs: Boundary, schedule: Schedule, head: LossHead, names: Names) -> Timeline:
        """Run the whole schedule, then bring each leaf its gradient."""
        minibatch = self._minibatch(inputs, schedule, head, keeps_graph=True)
        gradients = self._gradients(minibatch, minibatch.run, inputs, names)
        head.correct(gradients)
        hand_over([*inputs.tensors, *names], gradients)
        return minibatch.timeline()

    @torch.no_grad()
    def _forwards_only(
        self, inputs: Boundary, schedule: Schedule, head: LossHead | None
    ) -> MiniBatch:
        minibatch = self._minibatch(inputs, schedule, head, keeps_graph=False)
        with self._lock:
            minibatch.run_forwards()
        return minibatch

    def _minibatch(
        self, inputs: Boundary, schedule: Schedule, head: LossHead | None, *, keeps_graph: bool
    ) -> MiniBatch:
        minibatch = MiniBatch(
            self.stages, schedule, self._executor, keeps_graph=keeps_graph, head=head
        )
        for microbatch, piece in enumerate(scatter(inputs, schedule.num_microbatches)):
            minibatch.put_input(microbatch, piece)
        return minibatch

    def _gradients(
        self, minibatch: MiniBatch, run: Callable[[], None], inputs: Boundary, names: Names
    ) -> Gradients:
        """Run the backwards; the gradients of the input's tensors, then of the parameters."""
        with self._lock:
            by_parameter = collect_gradients(self.stages, names, run)
        by_input = join_gradients(minibatch.take_input_gradients(), inputs)
        return [*by_input, *(by_parameter.pop(parameter, None) for parameter in names)]
