"""Transfers run beside what is computed, and the host waits for nothing meanwhile."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from gpipe import GPipe
from gpipe.costs import StageCosts
from gpipe.schedule import LOOPED_SCHEDULES, SCHEDULE_NAMES, Kind
from gpipe.simulate import simulate
from tests.members import CHECKPOINT_MODES
from tests.streams import scenario_layers
from tests.streams.fakes import World
from tests.streams.replay import replay
from tests.streams.scenario_layers import First, Masks
from tests.streams.world import world

NUM_DEVICES, NUM_MICROBATCHES, WIDTH = 4, 16, 3
COST_S = {Kind.FORWARD: 1.0, Kind.RECOMPUTE: 1.0, Kind.BACKWARD: 2.0}
TRANSFER_S = 0.5
NUM_LOOKS = 2  # mini-batches, from the first, in which the host looks at what is computed

over_all_schedules = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
over_all_modes = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


def trained(
    made: World, schedule: str, checkpoint: str, num_steps: int, *, on_host: bool = False
) -> tuple[GPipe, object]:
    """A model after some steps, the log and the list of waits of the last of them; its result."""
    num_stages = NUM_DEVICES * (2 if schedule in LOOPED_SCHEDULES else 1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(num_stages)]
    model = GPipe(
        nn.Sequential(*layers), [1] * num_stages, NUM_MICROBATCHES,
        schedule=schedule, checkpoint=checkpoint, devices=made.names,
    )  # fmt: skip
    x, y = torch.randn(2, NUM_MICROBATCHES, WIDTH)
    if not on_host:
        x, y = x.to(made.names[0]), y.to(made.names[-1])
    for _ in range(num_steps):
        made.log.clear()
        made.synchronizations.clear()
        result = model.step(x, y, mse_loss)
    return model, result


# A target's copy once queued behind activations that were not there yet: up to 20 % longer.
@pytest.mark.parametrize("on_host", [False, True])
@over_all_schedules
@over_all_modes
def test_the_recorded_graph_takes_as_long_as_the_simulated_one(schedule, checkpoint, on_host):
    with world(NUM_DEVICES) as made:
        model, result = trained(made, schedule, checkpoint, num_steps=1, on_host=on_host)
    records = [record for row in result.recorder.rows.values() for record in row]
    marks_s = replay(made, {end: COST_S[action.kind] for action, _, end in records}, TRANSFER_S)
    makespan_s = max(marks_s[end] for _, _, end in records)

    order = model._layout.orders.of_step(NUM_MICROBATCHES, checkpoint)
    costs = StageCosts.uniform(len(model.stages), latency_s=TRANSFER_S)
    assert makespan_s == simulate(order, costs).makespan_s
    assert makespan_s < in_turn_s(len(model.stages))


def in_turn_s(num_stages: int) -> float:
    """What it would take at least if a device did nothing else while it sends or receives."""
    per_microbatch_s = COST_S[Kind.FORWARD] + COST_S[Kind.BACKWARD] + 4 * TRANSFER_S
    return per_microbatch_s * NUM_MICROBATCHES * num_stages / NUM_DEVICES


@over_all_schedules
@over_all_modes
def test_the_host_waits_for_nothing_between_the_first_action_and_the_last(schedule, checkpoint):
    with world(NUM_DEVICES) as made:
        trained(made, schedule, checkpoint, num_steps=NUM_LOOKS + 1)
    assert made.synchronizations == []


def test_the_host_waits_where_it_looks_at_what_is_computed():
    with world(NUM_DEVICES) as made:
        trained(made, "fill_drain", "always", num_steps=1)
    assert made.synchronizations


# Each micro-batch once had a copy of its own: M times the memory, and the time.
def test_what_every_micro_batch_gets_whole_is_copied_once():
    def num_copies(place: str) -> int:
        mask = torch.ones(scenario_layers.WIDTH).to(place)
        x = torch.randn(NUM_MICROBATCHES, scenario_layers.WIDTH)
        made.log.clear()
        model.step((x, mask), x, mse_loss)
        return sum(entry[0] == "copy" for entry in made.log)

    with world(1) as made:
        layers = nn.Sequential(Masks(), First())
        options = {"devices": made.names, "split": (0, None)}
        model = GPipe(layers, [2], NUM_MICROBATCHES, **options)
        assert num_copies("cpu") == num_copies(made.names[0]) + 1
