"""Times of layers within a budget."""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from gpipe.costs.size import line_through
from gpipe.profiling.attempt import Attempt
from gpipe.profiling.walk import Trial
from gpipe.stage.boundary import pack
from gpipe.stage.device import Device
from gpipe.stage.joint import join_skips

__all__ = ["LayerTimes", "Timing"]

MAX_REPEATS = 50  # of each number of rows: more would not change the median
NUM_CALIBRATIONS = 20
MAX_OTHERS_BYTES = 64 * 1024**2  # more than the caches hold


class LayerTimes(NamedTuple):
    """Seconds of one layer with all rows, and the parts of them that do not grow with the rows.

    Attributes:
        is_proportional: Whether there was only one number of rows, or no time for a second.
    """

    forward_s: float
    backward_s: float
    forward_fixed_s: float
    backward_fixed_s: float
    is_proportional: bool


class _Times(NamedTuple):
    """Seconds of one attempt."""

    forward_s: float
    backward_s: float


class Timing:
    """Measures layer after layer, each for its share of what is left of a time budget.

    Every layer has a warm-up of its own, and at least one repeat after it, whatever the budget.
    What a layer takes that does nothing, which is what measuring takes, is not counted.

    Args:
        num_layers: How many will be measured.
        rows: All rows, and fewer; as many as all: times grow with the rows, it is assumed.
        device: Where the layers compute.
        time_budget_s: For all layers together, from now on.
        layer_bytes: Of each layer, what passes through the caches of the CPU in its turn.
    """

    def __init__(
        self,
        num_layers: int,
        rows: tuple[int, int],
        device: Device,
        time_budget_s: float,
        layer_bytes: Sequence[int] = (),
    ) -> None:
        self._layers_left = num_layers
        self._layer_bytes = layer_bytes
        most_bytes = min(sum(layer_bytes), MAX_OTHERS_BYTES)
        self._others = torch.zeros(most_bytes // 4, device=device.torch_device)
        self._of_others = self._others[:0]
        self._rows = rows
        self._device = device
        self._overhead = _Times(0.0, 0.0)
        self._overhead = self._of_nothing()
        self._end_s = perf_counter() + time_budget_s

    def measure(self, trials: Sequence[Trial]) -> LayerTimes:
        """The times of the next layer, given a trial with all rows and one with fewer."""
        start_s = perf_counter()
        stop_s = start_s + (self._end_s - start_s) / self._layers_left
        if self._layer_bytes:
            own_bytes = self._layer_bytes[-self._layers_left]
            self._of_others = self._others[: (sum(self._layer_bytes) - own_bytes) // 4]
        self._layers_left -= 1
        full, fewer = self._repeat(trials, stop_s)
        rows = self._rows if fewer else (self._rows[0], self._rows[0])
        forward_s, forward_fixed_s = _line("forward_s", full, fewer, rows)
        backward_s, backward_fixed_s = _line("backward_s", full, fewer, rows)
        return LayerTimes(forward_s, backward_s, forward_fixed_s, backward_fixed_s, not fewer)

    def _repeat(self, trials: Sequence[Trial], stop_s: float) -> tuple[list[_Times], list[_Times]]:
        """Times with all rows, and with fewer, in turn: what changes meanwhile meets both."""
        full_trial, fewer_trial = trials
        self._time(full_trial)
        full, fewer = [self._time(full_trial)], list[_Times]()
        has_fewer = self._rows[0] != self._rows[1]
        while perf_counter() < stop_s and len(full) < MAX_REPEATS:
            if has_fewer and not fewer:
                self._time(fewer_trial)
            if has_fewer:
                fewer.append(self._time(fewer_trial))
            full.append(self._time(full_trial))
        return full, fewer

    def _time(self, trial: Trial) -> _Times:
        attempt = trial()
        # Between two turns of a layer all others have theirs, and its weights leave the caches.
        self._of_others.add_(1)
        forward_s = self._seconds_of(attempt.forward)
        attempt.prepare_backward()
        self._of_others.add_(1)
        backward_s = self._seconds_of(attempt.backward)
        forward_overhead_s, backward_overhead_s = self._overhead
        return _Times(
            max(0.0, forward_s - forward_overhead_s), max(0.0, backward_s - backward_overhead_s)
        )

    def _of_nothing(self) -> _Times:
        """The times of a layer that gives what it is given."""
        given = torch.zeros(1, device=self._device.torch_device, requires_grad=True)
        inputs = join_skips(pack(given), {})
        times = [self._time(lambda: Attempt(_same, inputs, ())) for _ in range(NUM_CALIBRATIONS)]
        return _Times(*(median(column) for column in zip(*times, strict=True)))

    def _seconds_of(self, action: Callable[[], None]) -> float:
        start = self._device.moment()
        action()
        start_s, end_s = self._device.seconds([start, self._device.moment()])
        return end_s - start_s


def _same(value: Any) -> Any:
    return value


def _line(
    name: str, full: Sequence[_Times], fewer: Sequence[_Times], rows: tuple[int, int]
) -> tuple[float, float]:
    """The median with all rows, and its fixed part."""
    full_s, fewer_s = (
        median([getattr(times, name) for times in each]) for each in (full, fewer or full)
    )
    fixed_s, _ = line_through(full_s, fewer_s, *rows)
    return full_s, fixed_s
