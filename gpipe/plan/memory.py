"""What each stage needs, by what it is for."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from gpipe.costs import LayerCosts, SharedParameter, StageCosts
from gpipe.schedule import Action, Kind, Schedule
from gpipe.timeline import Timeline

__all__ = [
    "Held",
    "StageMemory",
    "held_at_peak",
    "held_by_workers",
    "state_of",
    "waiting_bytes",
]


class StageMemory(NamedTuple):
    """The bytes that a stage needs at its peak, by what they are for.

    Attributes:
        weights_bytes: Parameters, the copies of them that autocast has cast, and buffers.
        gradients_bytes: Of the trainable parameters; twice where gradients of several mini-batches
            are added up, since each mini-batch gathers its own first.
        optimizer_bytes: The state of the optimizer.
        inputs_bytes: The boundary inputs of the micro-batches that are held.
        inside_bytes: What layers have saved: of each of them, or of one where they are recomputed.
        transfer_bytes: Boundaries and gradients that have arrived, or are arriving.
    """

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    inputs_bytes: float
    inside_bytes: float
    transfer_bytes: float

    @property
    def peak_bytes(self) -> float:
        """All of it together."""
        return sum(self)

    @property
    def fixed_bytes(self) -> float:
        """What does not depend on how many micro-batches are held."""
        return self.peak_bytes - self.activation_bytes

    @property
    def activation_bytes(self) -> float:
        """What micro-batches hold."""
        return self.inputs_bytes + self.inside_bytes


class Held(NamedTuple):
    """What micro-batches hold in a stage."""

    inputs_bytes: float
    inside_bytes: float


class _State(NamedTuple):
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float


def state_of(
    costs: LayerCosts,
    balance: Sequence[int],
    optimizer_bytes_per_gradient_byte: float,
    *,
    accumulates: bool,
    workers: Sequence[int] | None = None,
) -> list[_State]:
    """What is there in each stage as long as the model is trained.

    A parameter that several layers share lives with the first of them, and so does the state of the
    optimizer; any other device has one copy. Each layer gathers a gradient of its own.

    Args:
        costs: Of the layers.
        balance: Layers of each stage.
        optimizer_bytes_per_gradient_byte: How large the state of the optimizer is.
        accumulates: Whether gradients of several mini-batches are added up.
        workers: That of each stage; None: one has all, which never takes more than several.
    """
    stages = [range(*ends) for ends in pairwise(accumulate(balance, initial=0))]
    surplus = _surplus(costs.shared, stages, [0] * len(stages) if workers is None else workers)
    states = []
    for stage, more in zip(stages, surplus, strict=True):
        weights = sum(_weights_bytes(costs, layer) for layer in stage) - more.weights_bytes
        gathered = sum(costs.gradient_bytes[layer] for layer in stage)
        trained = gathered - more.trained_bytes
        gradients = gathered + (trained if accumulates else 0)
        states.append(_State(weights, gradients, trained * optimizer_bytes_per_gradient_byte))
    return states


def _weights_bytes(costs: LayerCosts, layer: int) -> float:
    return costs.parameter_bytes[layer] + costs.buffer_bytes[layer] + costs.cast_bytes[layer]


class _Surplus(NamedTuple):
    """What the layers of a stage count, and the stage does not have."""

    weights_bytes: float = 0.0
    trained_bytes: float = 0.0


def _surplus(
    shared: Sequence[SharedParameter], stages: Sequence[range], workers: Sequence[int]
) -> list[_Surplus]:
    surplus = [_Surplus() for _ in stages]
    for each in shared:
        having: set[int] = set()  # the workers that have it already; the first is its own
        for index, (stage, worker) in enumerate(zip(stages, workers, strict=True)):
            number = sum(layer in stage for layer in each.layers)
            if number:
                weights_bytes, trained_bytes = surplus[index]
                weights_bytes += (number - (worker not in having)) * each.parameter_bytes
                trained_bytes += (number - (not having)) * each.gradient_bytes
                surplus[index] = _Surplus(weights_bytes, trained_bytes)
                having.add(worker)
    return surplus


def held_at_peak(schedule: Schedule, costs: StageCosts) -> list[Held]:
    """What each stage holds when it holds most; order decides that, and time does not."""
    peaks = []
    for stage in range(schedule.num_stages):
        row = schedule.rows[schedule.worker_of(stage)]
        own = [action for action in row if action.stage == stage]
        peaks.append(_peak(own, schedule, costs))
    return peaks


def held_by_workers(schedule: Schedule, costs: StageCosts) -> list[float]:
    """What micro-batches hold on each worker at most; its stages need not peak together."""
    return [sum(_peak(row, schedule, costs)) for row in schedule.rows]


def _peak(actions: Sequence[Action], schedule: Schedule, costs: StageCosts) -> Held:
    return max(_levels(actions, schedule, costs), key=sum, default=Held(0, 0))


def _levels(actions: Sequence[Action], schedule: Schedule, costs: StageCosts) -> Iterator[Held]:
    """What is held in the midst of each action."""
    inputs_bytes = insides_bytes = 0.0
    for kind, stage, microbatch in (action for action in actions if action.peer is None):
        input_bytes = costs.input_bytes[stage]
        inside_bytes = max(0.0, costs.held_bytes[stage] - input_bytes)
        if kind is Kind.BACKWARD:
            inputs_bytes, insides_bytes = inputs_bytes - input_bytes, insides_bytes - inside_bytes
            continue
        if kind is Kind.FORWARD:
            inputs_bytes += input_bytes
        insides_bytes += inside_bytes
        yield Held(inputs_bytes, insides_bytes)
        if kind is Kind.FORWARD and microbatch in schedule.recomputed_in(stage):
            insides_bytes -= inside_bytes  # it drops its graph when it ends


def waiting_bytes(timeline: Timeline, schedule: Schedule, costs: StageCosts) -> list[float]:
    """The most that waits before each stage at once: boundaries, skips, and their gradients.

    Whatever is ready is sent at once, so it lies with the receiver until its action starts.
    """
    ends_s, starts_s = _moments(timeline, schedule)
    waiting = []
    for stage in range(schedule.num_stages):
        total = 0.0
        for kind, neighbour, edge in (
            (Kind.FORWARD, stage - 1, stage - 1),
            (Kind.BACKWARD, stage + 1, stage),
        ):
            if not 0 <= neighbour < schedule.num_stages:
                continue
            if schedule.worker_of(neighbour) != schedule.worker_of(stage):
                number = _most_at_once(ends_s[kind, neighbour], starts_s[kind, stage])
                total += number * costs.boundary_bytes[edge]
        waiting.append(total)
    for (stash, pop), num_bytes in costs.skip_bytes.items():
        for kind, sender, receiver in ((Kind.FORWARD, stash, pop), (Kind.BACKWARD, pop, stash)):
            number = _most_at_once(ends_s[kind, sender], starts_s[kind, receiver])
            waiting[receiver] += number * num_bytes
    return waiting


_Moments = dict[tuple[Kind, int], list[float]]


def _moments(timeline: Timeline, schedule: Schedule) -> tuple[_Moments, _Moments]:
    kinds = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
    keys = [(kind, stage) for kind in kinds for stage in range(schedule.num_stages)]
    ends_s: _Moments = {key: [] for key in keys}
    starts_s: _Moments = {key: [] for key in keys}
    for _, action, start_s, end_s in timeline.events:
        if action.peer is None:
            ends_s[action.kind, action.stage].append(end_s)
            starts_s[action.kind, action.stage].append(start_s)
    return ends_s, starts_s


def _most_at_once(arrivals_s: Sequence[float], departures_s: Sequence[float]) -> int:
    """The most that have arrived and not left; what arrives as another leaves comes first."""
    changes = [(moment_s, -1) for moment_s in arrivals_s]
    changes += [(moment_s, 1) for moment_s in departures_s]
    levels = accumulate(-change for _, change in sorted(changes))
    return max(levels, default=0)
