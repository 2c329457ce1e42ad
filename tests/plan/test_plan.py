"""What a plan says of time and memory."""

from dataclasses import replace

import pytest

from gpipe.costs import StageCosts
from gpipe.plan import DeviceSpec, plan
from gpipe.plan.memory import held_at_peak, waiting_bytes
from gpipe.plan.text import plan_text
from gpipe.schedule import RECOMPUTE_MODES, SCHEDULE_NAMES, add_recompute, resolve
from gpipe.simulate import simulate
from tests.plan.members import layer_costs


def planned(balance=(2, 2), rows=8, chunks=4, **options):
    return plan(layer_costs(), balance, rows=rows, chunks=chunks, **options)


def test_time_is_that_of_the_simulated_schedule():
    # Two layers of 1 s and 2 s a row, two rows in each of 4 micro-batches: (M+K-1)(t_F+t_B).
    made = planned(checkpoint="never")
    assert made.step_s == (4 + 1) * (2 + 4) * 2
    assert made.bubble == pytest.approx(1 / 5)


def test_a_faster_device_takes_less_time():
    both = DeviceSpec(speed=2.0)
    assert (
        planned(checkpoint="never", devices=both).step_s == planned(checkpoint="never").step_s / 2
    )
    slower = planned(checkpoint="never", devices=[DeviceSpec(), both])
    assert planned(checkpoint="never", devices=both).step_s < slower.step_s


def test_a_link_takes_time():
    slow = DeviceSpec(bandwidth_bytes_per_s=10, latency_s=0.5)
    made = planned(rows=1, chunks=1, checkpoint="never", devices=slow)
    # One row there and its gradient back: 10 bytes in a second, and half a second more.
    assert made.step_s == 4 * 3 + 2 * 1.5


def test_each_part_of_memory_is_told_apart():
    made = planned(checkpoint="never", optimizer_bytes_per_gradient_byte=2.0)
    first, last = made.memory
    assert first.weights_bytes == first.gradients_bytes == 200
    assert first.optimizer_bytes == 400
    # 1F1B: stage 0 holds two micro-batches of two rows, each with 10 bytes and two times 20.
    assert (first.inputs_bytes, first.inside_bytes) == (2 * 20, 2 * 80)
    assert (last.inputs_bytes, last.inside_bytes) == (20, 80)
    # One boundary, or one gradient, at a time.
    assert first.transfer_bytes == last.transfer_bytes == 20
    assert first.peak_bytes == 200 + 200 + 400 + 40 + 160 + 20


def test_recomputed_micro_batches_hold_the_inside_of_one():
    made = planned(checkpoint="always", schedule="fill_drain")
    for memory in made.memory:
        assert (memory.inputs_bytes, memory.inside_bytes) == (4 * 20, 80)


def test_accumulated_gradients_are_there_twice():
    assert planned(accumulates=True).memory[0].gradients_bytes == 400


def test_rows_that_do_not_divide_count_as_the_largest_micro_batch():
    assert planned(rows=7).memory == planned(rows=8).memory
    assert planned(rows=3, chunks=8).schedule.num_microbatches == 3


@pytest.mark.parametrize("mode", RECOMPUTE_MODES)
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_what_is_held_is_what_the_simulation_holds(name, mode):
    schedule = add_recompute(resolve(name, 4, 6), mode)
    costs = layer_costs().stage_costs([1, 1, 1, 1], 2)
    held = [sum(each) for each in held_at_peak(schedule, costs)]
    assert held == list(simulate(schedule, costs).peak_bytes)


def test_what_waits_piles_up_before_a_slow_stage():
    costs = layer_costs([1.0, 1.0, 5.0, 5.0])
    made = plan(costs, [2, 2], rows=8, chunks=8, schedule="fill_drain", checkpoint="never")
    # While stage 1 works on its first of 10 s, stage 0 is done with the 7 others, 2 s each.
    assert made.memory[1].transfer_bytes > 5 * 10
    assert plan(costs, [2, 2], rows=8, chunks=8, schedule="1f1b").memory[1].transfer_bytes <= 20


def test_skips_wait_at_their_far_end():
    costs = StageCosts.uniform(4, boundary_bytes=1)
    with_skip = replace(costs, skip_bytes={(0, 3): 1000})
    schedule = resolve("1f1b", 4, 8)
    plain, more = (
        waiting_bytes(simulate(schedule, each), schedule, each) for each in (costs, with_skip)
    )
    # Three skips are there before the last stage takes up the first; two gradients come back
    # while the first goes the long way through the stages between, 2 s each.
    assert (more[3] - plain[3], more[0] - plain[0]) == (3000, 2000)
    assert more[1:3] == plain[1:3]


@pytest.mark.parametrize("mode", RECOMPUTE_MODES)
def test_several_stages_share_the_memory_of_their_device(mode):
    made = planned([1, 1, 1, 1], schedule="interleaved_1f1b", num_workers=2, checkpoint=mode)
    # They need not peak together: the sum of their peaks would be up to three times as much.
    assert made.held_bytes == made.timeline.peak_bytes
    fixed = [memory.peak_bytes - memory.activation_bytes for memory in made.memory]
    assert made.worker_bytes[0] == made.held_bytes[0] + fixed[0] + fixed[2]


def test_what_lacks_memory_is_named():
    assert planned(devices=DeviceSpec(memory_bytes=530)).crowded == 0
    assert planned(devices=DeviceSpec(memory_bytes=2000)).crowded is None
    devices = [DeviceSpec(memory_bytes=2000), DeviceSpec(memory_bytes=100)]
    assert planned(devices=devices).crowded == 1


def test_the_text_has_every_stage_and_says_where_memory_lacks():
    text = plan_text(planned(devices=DeviceSpec(memory_bytes=530)), "1f1b", rows=8)
    assert "2 stages [2, 2] on 2 devices, 8 rows in 4 micro-batches, 1f1b" in text
    assert "step 68 s" in text
    lines = text.splitlines()
    assert lines[-2].split()[:3] == ["0", "0", "0-1"]
    assert lines[-2].endswith("too much")
    assert not lines[-1].endswith("too much")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": (2, 1)}, "balance is .*3 layers, but the costs are those of 4"),
        ({"chunks": 0}, "chunks"),
        ({"rows": 0}, "rows"),
        ({"checkpoint": "sometimes"}, "sometimes"),
        ({"schedule": "1f2b"}, "1f2b"),
        ({"devices": [DeviceSpec()]}, "2 workers and 1 device\\."),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        planned(**options)


@pytest.mark.parametrize("field", ["memory_bytes", "speed", "bandwidth_bytes_per_s"])
def test_a_device_cannot_have_less_than_nothing(field):
    with pytest.raises(ValueError, match=f"`{field}` of a device is -1"):
        DeviceSpec(**{field: -1})
