"""What ways to run take at least, told without simulating them."""

from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpipe.costs import LayerCosts
from gpipe.plan.device_spec import DeviceSpec, edges
from gpipe.plan.grid import Candidate, Way
from gpipe.plan.memory import state_of
from gpipe.schedule import add_recompute, as_schedule

__all__ = ["ROUNDING", "Bounds"]

ROUNDING = 1e-8  # sums of the same numbers in another order differ by less than this part of them

Numbers = NDArray[np.float64]


class _Layers(NamedTuple):
    """Of a micro-batch, by place between layers: what all layers before it take together.

    Attributes:
        forward_s: Seconds of their forwards.
        backward_s: Seconds of their backwards.
        boundary_bytes: What passes there.
    """

    forward_s: Numbers
    backward_s: Numbers
    boundary_bytes: Numbers


class Bounds:
    """Least times and bytes of the ways to run a model.

    Args:
        costs: Of the layers.
        rows: Those of a mini-batch.
        devices: The devices.
        optimizer_bytes_per_gradient_byte: How large the state of the optimizer is.
        accumulates: Whether gradients of several mini-batches are added up.
    """

    def __init__(
        self,
        costs: LayerCosts,
        rows: int,
        devices: Sequence[DeviceSpec],
        optimizer_bytes_per_gradient_byte: float,
        accumulates: bool,
    ) -> None:
        self._costs = costs
        self._rows = rows
        self._devices = devices
        self._fastest = max(device.speed for device in devices)
        self._is_boundless = all(device.memory_bytes == inf for device in devices)
        self._layers = cache(partial(_layers, costs))
        self._stage_costs = cache(costs.stage_costs)
        self._optimizer_bytes_per_gradient_byte = optimizer_bytes_per_gradient_byte
        self._accumulates = accumulates
        self._fixed_bytes = cache(self._find_fixed_bytes)
        self._recomputed = cache(_num_recomputed)

    def way_s(self, way: Way) -> float:
        """Seconds that no cut is faster than.

        One device has to do its share of all that there is to do. And some stage takes long: if
        all micro-batches are to be through stage s in time Z, and the first one reaches it when it
        is through all before, the stages from s on take (1 - 1/M) times what those from s - 1 on
        may take, and the first one may take Z.
        """
        layers = self._layers(self._rows_of(way))
        forward_s, backward_s = layers.forward_s[-1], layers.backward_s[-1]
        action_s = way.num_stages * self._costs.action_s
        pass_s = forward_s + backward_s + 2 * action_s
        again_s = forward_s + action_s if way.checkpoint == "always" else 0.0
        busy_s = way.chunks * (pass_s + again_s) / way.num_devices
        filled_s = pass_s / (1 - (1 - 1 / way.chunks) ** way.num_stages)
        return float(max(busy_s, filled_s) / self._fastest)

    def candidate_s(self, candidate: Candidate, *, counts_recomputes: bool = False) -> float:
        """Seconds that no step of these stages is shorter than.

        A stage cannot begin before a micro-batch is through all stages before it; it has its own
        work; and behind its last backward the gradient goes back through these stages. The same
        holds for a worker with all its stages, as from the first of them.

        Args:
            candidate: With its stages.
            counts_recomputes: Whether the schedule is built to see what "except_last" recomputes.
        """
        num_devices = candidate.num_devices
        forward_s, backward_s, ways_s = self._stages(candidate)
        own_s = candidate.chunks * (forward_s + backward_s)
        own_s += self._num_recomputes(candidate, counts_recomputes) * forward_s
        back_and_forth_s = (forward_s + backward_s)[:-1] + 2 * ways_s
        before_s = np.concatenate(([0.0], np.cumsum(back_and_forth_s)))
        of_workers_s = own_s.reshape(-1, num_devices).sum(axis=0)
        return float(max((before_s + own_s).max(), (before_s[:num_devices] + of_workers_s).max()))

    def lack_bytes(self, candidate: Candidate) -> float:
        """What the device that lacks most lacks at least; not above 0 where all may have enough."""
        if self._is_boundless:
            return -inf
        stages, num_devices = range(candidate.num_stages), candidate.num_devices
        held = self._stage_costs(candidate.balance, self._rows_of(candidate)).held_bytes
        fixed = self._fixed_bytes(candidate.balance, num_devices)
        lacks = []
        for worker, device in enumerate(self._devices[:num_devices]):
            own = stages[worker::num_devices]
            needed = sum(fixed[stage] for stage in own) + max(held[stage] for stage in own)
            lacks.append(needed * (1 - ROUNDING) - device.memory_bytes)
        return max(lacks)

    def _find_fixed_bytes(self, balance: Sequence[int], num_devices: int) -> list[float]:
        """What each stage needs whatever the order."""
        states = state_of(
            self._costs,
            balance,
            self._optimizer_bytes_per_gradient_byte,
            accumulates=self._accumulates,
            workers=[stage % num_devices for stage in range(len(balance))],
        )
        return list(map(sum, states))

    def _rows_of(self, way: Way | Candidate) -> int:
        return -(-self._rows // way.chunks)

    def _stages(self, candidate: Candidate) -> tuple[Numbers, Numbers, Numbers]:
        """Seconds of a forward and a backward of each stage, and of the way to the next one."""
        num_devices, num_stages = candidate.num_devices, candidate.num_stages
        layers = self._layers(self._rows_of(candidate))
        ends = np.cumsum((0, *candidate.balance))
        of_stage = [self._devices[stage % num_devices] for stage in range(num_stages)]
        speeds = np.array([device.speed for device in of_stage])
        forward_s, backward_s = (
            (np.diff(before_s[ends]) + self._costs.action_s) / speeds
            for before_s in (layers.forward_s, layers.backward_s)
        )
        if num_devices == 1:  # nothing travels
            return forward_s, backward_s, np.zeros(num_stages - 1)
        return forward_s, backward_s, _transfers_s(of_stage, layers.boundary_bytes[ends[1:-1]])

    def _num_recomputes(self, candidate: Candidate, is_exact: bool) -> Numbers | float:
        """How many micro-batches each stage recomputes, or how many at least."""
        if candidate.checkpoint != "except_last":
            return float(candidate.chunks if candidate.checkpoint == "always" else 0)
        names = candidate.schedule, candidate.num_stages, candidate.chunks, candidate.num_devices
        return self._recomputed(*names) if is_exact else 0.0


def _num_recomputed(name: str, num_stages: int, num_microbatches: int, num_workers: int) -> Numbers:
    """How many micro-batches "except_last" recomputes in each stage."""
    order = as_schedule(name, num_stages, num_microbatches, num_workers)
    order = add_recompute(order, "except_last")
    return np.array([len(order.recomputed_in(stage)) for stage in range(num_stages)], np.float64)


def _layers(costs: LayerCosts, rows: int) -> _Layers:
    each = costs.stage_costs([1] * costs.num_layers, rows)
    forward_s, backward_s = (
        accumulate((time_s - costs.action_s for time_s in times_s), initial=0.0)
        for times_s in (each.forward_s, each.backward_s)
    )
    boundaries = (0.0, *each.boundary_bytes)
    return _Layers(np.array([*forward_s]), np.array([*backward_s]), np.array(boundaries))


def _transfers_s(of_stage: Sequence[DeviceSpec], boundary_bytes: Numbers) -> Numbers:
    """Seconds that each boundary takes on its way to another device."""
    bandwidth, latency = map(np.array, edges(of_stage))
    slowness = np.divide(1.0, bandwidth, out=np.zeros(len(bandwidth)), where=bandwidth > 0)
    return np.asarray(latency + boundary_bytes * slowness)
