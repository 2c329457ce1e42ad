"""What is known of a mini-batch before it begins, and when it has ended."""

from typing import NamedTuple

from torch import Tensor

from gpipe.execution.recorder import Recorder
from gpipe.stage.boundary import Boundary

__all__ = ["Ended", "Size", "Totals"]


class Size(NamedTuple):
    """What is known of a mini-batch before it begins.

    Attributes:
        rows: Those of this replica.
        total_rows: Those of all replicas.
        num_microbatches: Into how many the former are cut.
        trains: Whether there will be gradients.
    """

    rows: int
    total_rows: int
    num_microbatches: int
    trains: bool


class Totals(NamedTuple):
    """What is known of a mini-batch only at its end.

    Attributes:
        loss: That of the mini-batch; None without a loss.
        factor: What all gradients are still to be multiplied with; None for one.
        has_gradients: Whether any stage has some, here or in another process.
    """

    loss: Tensor | None = None
    factor: Tensor | None = None
    has_gradients: bool = False


class Ended(NamedTuple):
    """A mini-batch that has gone through the stages.

    Attributes:
        outputs: What has left the last stage, where no loss took it and it is here.
        loss: That of the mini-batch, if there was one.
        recorder: When each action ran.
    """

    outputs: list[Boundary]
    loss: Tensor | None
    recorder: Recorder
