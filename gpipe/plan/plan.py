"""One way to run a model: how long a step takes, and what each stage needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from gpipe.arguments import require_choice, require_count
from gpipe.costs import LayerCosts, StageCosts
from gpipe.plan.all_reduce import ring_s, visible_s
from gpipe.plan.device_spec import DeviceSpec, edges, spread
from gpipe.plan.memory import (
    StageMemory,
    held_at_peak,
    held_by_workers,
    state_of,
    waiting_bytes,
)
from gpipe.schedule import RECOMPUTE_MODES, Builder, Schedule, add_recompute, as_schedule
from gpipe.simulate import simulate
from gpipe.timeline import Timeline

__all__ = ["Outline", "Plan", "outline", "plan"]


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What is known of a plan before it is simulated.

    Attributes:
        balance: Layers of each stage.
        schedule: The order, with its recomputes.
        checkpoint: Which micro-batches are recomputed.
        devices: That of each worker.
        costs: Of the stages, on these devices.
        memory: What each stage needs; what waits before it is left out.
        held_bytes: What micro-batches hold on each worker at most.
        gradient_bytes: What each stage has of gradients after a mini-batch.
        num_replicas: How many pipelines train together, and sum their gradients in rings.
    """

    balance: tuple[int, ...]
    schedule: Schedule
    checkpoint: str
    devices: tuple[DeviceSpec, ...]
    costs: StageCosts
    memory: tuple[StageMemory, ...]
    held_bytes: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    num_replicas: int = 1

    @property
    def worker_bytes(self) -> tuple[float, ...]:
        """What each worker's device needs for its stages, at most."""
        return tuple(
            held + sum(self.memory[stage].fixed_bytes for stage in self.schedule.stages_of(worker))
            for worker, held in enumerate(self.held_bytes)
        )

    @property
    def crowded(self) -> int | None:
        """The worker that lacks most memory; None where all have enough."""
        lacks = [
            needed - device.memory_bytes
            for needed, device in zip(self.worker_bytes, self.devices, strict=True)
        ]
        worst = max(range(len(lacks)), key=lacks.__getitem__)
        return worst if lacks[worst] > 0 else None

    @property
    def busy_s(self) -> float:
        """How long the busiest worker computes; no step is shorter."""
        counts = [len(self.schedule.recomputed_in(s)) for s in range(self.schedule.num_stages)]
        stage_s = [
            self.schedule.num_microbatches * (forward_s + backward_s) + count * recompute_s
            for forward_s, backward_s, recompute_s, count in zip(
                self.costs.forward_s,
                self.costs.backward_s,
                self.costs.recompute_s,
                counts,
                strict=True,
            )
        ]
        workers = range(self.schedule.num_workers)
        return max(sum(stage_s[s] for s in self.schedule.stages_of(worker)) for worker in workers)


@dataclass(frozen=True, kw_only=True)
class Plan(Outline):
    """A way to run a model, with what it needs and how long it takes.

    Attributes:
        timeline: When each action runs.
        visible_reduce_s: Seconds after the last action until the gradients of all replicas are
            summed; what overlaps the drain is not seen.
    """

    timeline: Timeline
    visible_reduce_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds from the first action of a mini-batch to the last sum, without the optimizer."""
        return self.timeline.makespan_s + self.visible_reduce_s

    @property
    def bubble(self) -> float:
        """The part of all workers' time in which they idle, 0 to 1."""
        return self.timeline.bubble


def plan(
    costs: LayerCosts,
    balance: Sequence[int],
    *,
    rows: int,
    chunks: int,
    schedule: str | Schedule | Builder = "1f1b",
    checkpoint: str = "except_last",
    num_workers: int | None = None,
    devices: DeviceSpec | Sequence[DeviceSpec] = DeviceSpec(),  # noqa: B008 - it is frozen
    optimizer_bytes_per_gradient_byte: float = 0.0,
    accumulates: bool = False,
    num_replicas: int = 1,
) -> Plan:
    """Predict one way to run a model.

    Args:
        costs: Of the layers, measured or counted.
        balance: Layers of each stage.
        rows: Those of a mini-batch, of one replica.
        chunks: Micro-batches that are asked for; never more than there are rows.
        schedule: As for `GPipe`.
        checkpoint: "always", "except_last" or "never".
        num_workers: How many share the stages; None: as many as the schedule says.
        devices: That of each worker, or one that stands for all.
        optimizer_bytes_per_gradient_byte: How large the state of the optimizer is: 2 for Adam.
        accumulates: Whether gradients of several mini-batches are added up.
        num_replicas: How many pipelines train together; they sum their gradients over the links of
            their devices, each stage as soon as it is done.

    Returns:
        The plan; whether it fits is for `Plan.crowded` to say.

    Raises:
        TypeError: A size is no whole number.
        ValueError: The balance is not one of these layers, a device lacks a number that is needed,
            or there are too few devices.
        ScheduleError: The schedule is for other sizes.
    """
    made = outline(
        costs,
        balance,
        rows=rows,
        chunks=chunks,
        schedule=schedule,
        checkpoint=checkpoint,
        num_workers=num_workers,
        devices=devices,
        optimizer_bytes_per_gradient_byte=optimizer_bytes_per_gradient_byte,
        accumulates=accumulates,
        num_replicas=num_replicas,
    )
    return simulated(made)


def simulated(made: Outline) -> Plan:
    """The plan of an outline."""
    timeline = simulate(made.schedule, made.costs)
    waiting = waiting_bytes(timeline, made.schedule, made.costs)
    memory = tuple(
        each._replace(transfer_bytes=number)
        for each, number in zip(made.memory, waiting, strict=True)
    )
    reduce_s = _visible_reduce_s(made, timeline)
    found = {"memory": memory, "timeline": timeline, "visible_reduce_s": reduce_s}
    return Plan(**(vars(made) | found))


def _visible_reduce_s(made: Outline, timeline: Timeline) -> float:
    order = made.schedule
    of_stage = [made.devices[order.worker_of(stage)] for stage in range(order.num_stages)]
    ring = [
        ring_s(made.num_replicas, num_bytes, device.bandwidth_bytes_per_s)
        for num_bytes, device in zip(made.gradient_bytes, of_stage, strict=True)
    ]
    return visible_s(timeline, ring)


def outline(
    costs: LayerCosts,
    balance: Sequence[int],
    *,
    rows: int,
    chunks: int,
    schedule: str | Schedule | Builder,
    checkpoint: str,
    num_workers: int | None,
    devices: DeviceSpec | Sequence[DeviceSpec],
    optimizer_bytes_per_gradient_byte: float,
    accumulates: bool,
    num_replicas: int = 1,
) -> Outline:
    """All of a plan but its timeline; arguments as those of `plan`."""
    require_choice("checkpoint", checkpoint, RECOMPUTE_MODES)
    num_microbatches = min(require_count("chunks", chunks), require_count("rows", rows))
    order = as_schedule(schedule, len(balance), num_microbatches, num_workers)
    order = add_recompute(order, checkpoint)
    specs = spread(devices, order.num_workers)
    stage_costs = _stage_costs(costs, balance, -(-rows // num_microbatches), order, specs)
    states = state_of(
        costs,
        balance,
        optimizer_bytes_per_gradient_byte,
        accumulates=accumulates,
        workers=[order.worker_of(stage) for stage in range(order.num_stages)],
    )
    held = held_at_peak(order, stage_costs)
    return Outline(
        balance=tuple(balance),
        schedule=order,
        checkpoint=checkpoint,
        devices=tuple(specs),
        costs=stage_costs,
        memory=tuple(
            StageMemory(*state, *each, 0.0) for state, each in zip(states, held, strict=True)
        ),
        held_bytes=tuple(held_by_workers(order, stage_costs)),
        gradient_bytes=tuple(
            sum(costs.gradient_bytes[slice(*ends)])
            for ends in pairwise(accumulate(balance, initial=0))
        ),
        num_replicas=require_count("num_replicas", num_replicas),
    )


def _stage_costs(
    costs: LayerCosts,
    balance: Sequence[int],
    rows: int,
    order: Schedule,
    specs: Sequence[DeviceSpec],
) -> StageCosts:
    of_stage = [specs[order.worker_of(stage)] for stage in range(order.num_stages)]
    bandwidth, latency = edges(of_stage)
    made = costs.stage_costs(balance, rows, bandwidth_bytes_per_s=bandwidth, latency_s=latency)
    return replace(
        made,
        forward_s=_on(of_stage, made.forward_s),
        backward_s=_on(of_stage, made.backward_s),
        recompute_s=_on(of_stage, made.recompute_s),
    )


def _on(devices: Sequence[DeviceSpec], times_s: Sequence[float]) -> tuple[float, ...]:
    pairs = zip(devices, times_s, strict=True)
    return tuple(time_s / device.speed for device, time_s in pairs)
