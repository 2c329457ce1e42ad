"""The end of one mini-batch on one worker of several processes."""

from torch import Tensor
from torch.nn import Parameter

from gpipe.execution.facts import Totals
from gpipe.execution.harvest import Harvest
from gpipe.execution.settlement import Settlement
from gpipe.execution.wiring import Wiring
from gpipe.stage.randomness import Randomness

__all__ = ["Closing"]


class Closing:
    """What is left to do when the row is done; all of it may wait for other workers.

    Args:
        wiring: That of the mini-batch.
        settlement: What the workers tell each other.
        randomness: That of the mini-batch, which learns whether a layer drew on any worker.
        harvest: The gradients, if there are any.
    """

    def __init__(
        self,
        wiring: Wiring,
        settlement: Settlement,
        randomness: Randomness,
        harvest: Harvest | None,
    ) -> None:
        self._wiring = wiring
        self._settlement = settlement
        self._randomness = randomness
        self._harvest = harvest
        self._has_told = False

    def take(self) -> dict[Parameter, Tensor]:
        """All gradients of this worker; the others are told that it is done."""
        taken = {} if self._harvest is None else self._harvest.finish()
        self._wiring.finish()
        self._settlement.tell(drew=self._randomness.drawn, has_gradients=bool(taken))
        self._has_told = True
        return taken

    def totals(self) -> Totals:
        """What is known once all workers have told that they are done."""
        if not self._has_told:
            self.take()
        totals, self._randomness.drawn = self._settlement.hear()
        return totals
