"""What a step gives back."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gpipe.execution.recorder import Recorder
from gpipe.timeline import Timeline

__all__ = ["StepResult"]


@dataclass(frozen=True)
class StepResult:
    """What `GPipe.step` gives back.

    Attributes:
        loss: The loss of the mini-batch: a tensor with one number, without a graph. On a mesh it
            is the same on every rank, that of all replicas.
        output: The output of the mini-batch, without a graph; None unless it was asked for. On a
            mesh it is on the last worker.
        recorder: What the timeline is made of.
    """

    loss: Tensor
    output: Any
    recorder: Recorder | None = field(default=None, repr=False)

    @property
    def timeline(self) -> Timeline | None:
        """When each action ran, on a mesh those of this worker; None without gradients."""
        return self.recorder.timeline if self.recorder else None
