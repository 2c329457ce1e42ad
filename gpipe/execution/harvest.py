"""Brings the gradients of a worker's stages together with those of others."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.nn import Parameter

from gpipe.execution.peer import Posted, wait_for
from gpipe.execution.pipe import Pipe
from gpipe.execution.reduction import Reduction
from gpipe.execution.relay import Tie, relayed
from gpipe.stage.alias import Aliases
from gpipe.stage.gradients import summed, take_gradients
from gpipe.stage.stage import Stage

__all__ = ["Harvest"]


class Harvest:
    """The gradients of one mini-batch on one worker.

    What only one stage has is summed over replicas as soon as the stage is done; what several have
    is brought together at the end.

    Args:
        stages: Those of this worker; made before their parameters are replaced by aliases.
        of_loss: The aliases of the loss, if it has parameters of its own.
        ties: The parameters that several workers have.
        pipe: The workers.
        reduction: The sum over replicas.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        of_loss: Sequence[Aliases],
        ties: Sequence[Tie],
        pipe: Pipe,
        reduction: Reduction,
    ) -> None:
        self._stages = stages
        self._of_loss = of_loss
        self._ties = {tie.parameter: tie for tie in ties if tie.parameter is not None}
        self._pipe = pipe
        self._reduction = reduction
        users = [
            (stage, layer, parameter)
            for stage in stages
            for layer, alias in enumerate(stage.aliases, stage.first_layer)
            for parameter in alias.trained()
        ]
        of_stages = dict.fromkeys((stage, parameter) for stage, _, parameter in users)
        self._trained_by_loss = [each for alias in of_loss for each in alias.trained()]
        num_users = Counter([*(parameter for _, parameter in of_stages), *self._trained_by_loss])
        # In the order of the layers, which is that of all replicas.
        self._last_layer = {parameter: layer for _, layer, parameter in users}
        self._late = [
            each for each in self._last_layer if each in self._ties or num_users[each] > 1
        ]
        self._shared = set(self._late)
        self._own: dict[Stage, list[Parameter]] = {stage: [] for stage in stages}
        for stage, parameter in of_stages:
            if parameter not in self._shared:
                self._own[stage].append(parameter)
        self._by_layer: list[tuple[int, Parameter, Tensor]] = []

    def take_from(self, stage: Stage) -> None:
        """Take the gradients of a stage that is done, and start to sum them."""
        own: list[tuple[Parameter, Tensor]] = []
        for layer, alias in enumerate(stage.aliases, stage.first_layer):
            for parameter, gradient in alias.take_gradients():
                if parameter in self._shared:
                    self._by_layer.append((layer, parameter, gradient))
                else:
                    own.append((parameter, gradient))
        total = summed(own, _retain_nothing)
        del own
        self._add(self._own[stage], total)

    def finish(self) -> dict[Parameter, Tensor]:
        """All gradients, with what other workers and replicas have."""
        of_loss = take_gradients(self._of_loss, _retain_nothing)
        for parameter in [each for each in of_loss if each in self._shared]:
            # As if the last layer here that has it had used it once more.
            at = self._last_layer[parameter], parameter, of_loss.pop(parameter)
            self._by_layer.append(at)
        self._add(self._late, self._brought_together())
        own = [each for each in self._trained_by_loss if each not in self._shared]
        self._add(own, of_loss)
        pairs = self._reduction.finish()
        total = {parameter: gradient for parameter, gradient in pairs if gradient is not None}
        aliases = (alias for stage in self._stages for alias in stage.aliases)
        return total | dict(pair for alias in aliases for pair in alias.take_left_alone())

    def _add(self, parameters: Sequence[Parameter], total: dict[Parameter, Tensor]) -> None:
        self._reduction.add(parameters, [total.pop(each, None) for each in parameters])

    def _brought_together(self) -> dict[Parameter, Tensor]:
        """The sum for each parameter that several stages have, here or elsewhere."""
        self._by_layer.sort(key=lambda item: item[0])
        here = [pair for pair in self._by_layer if pair[1] not in self._ties]
        total = summed(((parameter, gradient) for _, parameter, gradient in here), _retain_nothing)
        on_their_way: list[Posted] = []
        for parameter, tie in self._ties.items():
            by_layer: defaultdict[int, list[Tensor]] = defaultdict(list)
            for layer, user, found in self._by_layer:
                if user is parameter:
                    by_layer[layer].append(found)
            device = self._stages[0].runs_on
            gradient, posted = relayed(tie, by_layer, self._pipe, device)
            on_their_way += posted
            if gradient is not None:
                total[parameter] = gradient
        wait_for(on_their_way)
        self._by_layer.clear()
        return total


def _retain_nothing(_: Iterable[Tensor | None]) -> None:
    """All is on one device here, and what is summed is used there."""
