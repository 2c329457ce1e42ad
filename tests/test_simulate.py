import random
from itertools import product

import pytest

from gpipe.costs import StageCosts
from gpipe.errors import ScheduleError
from gpipe.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    Transfer,
    add_recompute,
    add_transfers,
    fill_drain,
    interleaved_1f1b,
    one_f_one_b,
    peak_held,
    predecessors,
    resolve,
)
from gpipe.simulate import simulate
from gpipe.timeline import LostTime, ideal_bubble
from tests.schedule.members import MODES, NAMES, builders

F, R, B = map(Kind, "FRB")
SENDS = ("A>", "G>")


def random_costs(num_stages, seed):
    numbers = random.Random(seed)

    def some(count, low=1, high=9):
        return [numbers.randint(low, high) for _ in range(count)]

    return StageCosts(
        forward_s=some(num_stages),
        backward_s=some(num_stages),
        recompute_s=some(num_stages),
        boundary_bytes=some(num_stages),
        held_bytes=some(num_stages),
        input_bytes=some(num_stages),
        bandwidth_bytes_per_s=some(num_stages - 1, 0, 4),
        latency_s=some(num_stages - 1, 0, 2),
        skip_bytes={(0, num_stages - 1): 5} if num_stages > 1 else {},
    )


def times_of(timeline):
    return {event.action: (event.start_s, event.end_s) for event in timeline.events}


def settled_times(schedule, costs):
    """The earliest times by relaxation: raised until no rule is broken any more. An oracle."""
    lengths_s = {"F": costs.forward_s, "R": costs.recompute_s, "B": costs.backward_s}
    start_s = {action: 0.0 for row in schedule.rows for action in row}

    def end_s(action):
        if action.peer is None:
            return start_s[action] + lengths_s[action.kind][action.stage]
        return start_s[action] + costs.transfer_s(action.stage, action.peer)

    def earliest_s(row, place):
        action = row[place]
        if action.peer is not None and action.kind not in SENDS:
            return start_s[action.partner]
        bounds = [end_s(each) for each in row[:place] if each.peer is None][-1:]
        if action.peer is None:
            return max([0.0, *bounds, *(end_s(each) for each in predecessors(action, schedule))])
        other = schedule.worker_of(action.peer)
        bounds += [
            end_s(each)
            for each in row[:place]
            if each.kind in SENDS and schedule.worker_of(each.peer) == other
        ][-1:]
        return max([0.0, *bounds])

    moved = True
    while moved:
        moved = False
        for row in schedule.rows:
            for place, action in enumerate(row):
                bound_s = earliest_s(row, place)
                moved |= bound_s != start_s[action]
                start_s[action] = bound_s
    return {action: (start_s[action], end_s(action)) for action in start_s}


# ---- laws --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("forward_s", "backward_s"), [(1.0, 1.0), (1.0, 2.0), (3.0, 1.0)])
def test_law_12_makespan_and_bubble_are_those_of_the_formulas(name, forward_s, backward_s):
    for num_stages, num_microbatches in product(range(1, 9), (1, 2, 3, 4, 5, 8, 13, 24)):
        costs = StageCosts.uniform(num_stages, forward_s, backward_s)
        timeline = simulate(SCHEDULES[name](num_stages, num_microbatches), costs)
        length = num_microbatches + num_stages - 1
        assert timeline.makespan_s == length * (forward_s + backward_s)
        bubble = ideal_bubble(num_stages, num_microbatches)
        assert timeline.bubble == pytest.approx(bubble, rel=1e-12)
        assert timeline.worker_bubbles == pytest.approx([bubble] * num_stages, rel=1e-12)


@pytest.mark.parametrize(("forward_s", "backward_s"), [(1.0, 1.0), (1.0, 2.0), (3.0, 1.0)])
def test_law_the_makespan_of_interleaved_1f1b(forward_s, backward_s):
    for num_workers, v, rounds in product((1, 2, 3, 4, 8), (1, 2, 3), (1, 2, 3)):
        num_microbatches = rounds * num_workers
        costs = StageCosts.uniform(v * num_workers, forward_s, backward_s)
        timeline = simulate(interleaved_1f1b(num_workers, v, num_microbatches), costs)
        length = v * num_microbatches + num_workers - 1
        assert timeline.makespan_s == length * (forward_s + backward_s)


def test_law_12_the_simulated_order_is_that_of_the_rows():
    for index, (*_, schedule) in enumerate(builders((1, 2, 3, 5), (1, 2), (1, 2, 5, 8))):
        bare = add_recompute(schedule, MODES[index % 3])
        timeline = simulate(bare, random_costs(schedule.num_stages, index))
        assert timeline.rows == bare.rows


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_times_are_the_earliest_that_the_rules_allow(name, mode):
    for seed, (num_stages, v) in enumerate([(1, 1), (3, 1), (4, 1), (4, 2), (6, 3)]):
        workers = num_stages if name in SCHEDULES else num_stages // v
        schedule = add_recompute(resolve(name, num_stages, 4, workers), mode)
        schedule = add_transfers(schedule, [(0, num_stages - 1)] if num_stages > 2 else [])
        costs = random_costs(num_stages, seed)
        assert times_of(simulate(schedule, costs)) == settled_times(schedule, costs)


@pytest.mark.parametrize("name", NAMES)
def test_transfers_are_added_where_there_are_none(name):
    schedule, costs = resolve(name, 4, 5), random_costs(4, 7)
    assert simulate(schedule, costs) == simulate(add_transfers(schedule), costs)


@pytest.mark.parametrize("name", NAMES)
def test_law_a_link_carries_one_transfer_at_a_time(name):
    schedule = add_transfers(resolve(name, 4, 6))
    timeline = simulate(schedule, StageCosts.uniform(4, latency_s=2.5))
    links = {}
    for worker, action, start_s, end_s in timeline.events:
        if action.kind in SENDS:
            link = links.setdefault((worker, schedule.worker_of(action.peer)), [])
            assert not link or link[-1] <= start_s
            link.append(end_s)
    assert len(links) == 6


# ---- transfers ---------------------------------------------------------------------------------


def test_a_transfer_overlaps_computing():
    # F0.1 runs while the activation of F0.0 is on its way.
    timeline = simulate(one_f_one_b(2, 2), StageCosts.uniform(2, latency_s=1.0))
    times = times_of(timeline)
    assert times[Transfer(Kind.SEND_ACTIVATION, 0, 0, 1)] == (1.0, 2.0)
    assert times[Transfer(Kind.RECEIVE_ACTIVATION, 1, 0, 0)] == (1.0, 2.0)
    assert times[Action(F, 0, 1)] == (1.0, 2.0)
    assert times[Action(F, 1, 0)] == (2.0, 3.0)
    assert timeline.makespan_s == 1 + 1 + 3 + 3 + 1 + 2


def test_a_skip_is_there_before_it_is_needed():
    costs = StageCosts(
        forward_s=[1] * 3,
        backward_s=[2] * 3,
        bandwidth_bytes_per_s=[1, 1],
        skip_bytes={(0, 2): 10},
    )
    timeline = simulate(add_transfers(fill_drain(3, 1), [(0, 2)]), costs)
    assert times_of(timeline)[Action(F, 2, 0)] == (11.0, 12.0)
    assert times_of(timeline)[Action(B, 0, 0)] == (24.0, 26.0)


# ---- memory ------------------------------------------------------------------------------------


def test_law_what_is_held_without_recompute():
    for *_, schedule in builders((1, 2, 3, 4), (1, 2), (1, 2, 3, 8)):
        costs = StageCosts.uniform(schedule.num_stages, held_bytes=1, input_bytes=100)
        assert simulate(schedule, costs).peak_bytes == peak_held(schedule)


def test_law_a_checkpointed_stage_holds_inputs_and_the_inside_of_one_micro_batch():
    for num_stages, num_microbatches in product((1, 2, 4), (1, 2, 5)):
        costs = StageCosts.uniform(num_stages, held_bytes=100, input_bytes=1)
        timeline = simulate(
            add_recompute(fill_drain(num_stages, num_microbatches), "always"), costs
        )
        assert timeline.peak_bytes == (num_microbatches - 1 + 100,) * num_stages


def test_held_bytes_over_time():
    schedule = add_recompute(fill_drain(1, 2), "except_last")
    costs = StageCosts.uniform(1, held_bytes=10, input_bytes=3)
    (held,) = simulate(schedule, costs).held_bytes
    # F0.0 keeps its input, F0.1 everything; B0.1 frees that, R0.0 makes it anew, B0.0 frees all.
    assert held.times_s == (0.0, 1.0, 4.0, 4.0, 7.0)
    assert held.levels_bytes == (3.0, 13.0, 3.0, 10.0, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_held_in_the_end(name):
    for seed, mode in enumerate(MODES):
        timeline = simulate(add_recompute(resolve(name, 3, 4), mode), random_costs(3, seed))
        assert [held.levels_bytes[-1] for held in timeline.held_bytes] == [0, 0, 0]
        assert all(min(held.levels_bytes) >= 0 for held in timeline.held_bytes)
        assert all(list(held.times_s) == sorted(held.times_s) for held in timeline.held_bytes)


# ---- lost time ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_law_the_parts_are_all_of_the_lost_time(name):
    for seed, (mode, num_microbatches) in enumerate(product(MODES, (1, 3, 8))):
        schedule = add_recompute(resolve(name, 3, num_microbatches), mode)
        timeline = simulate(schedule, random_costs(3, seed))
        for lost, bubble in zip(timeline.lost_time, timeline.worker_bubbles, strict=True):
            assert min(lost) >= 0
            assert lost.idle_s == pytest.approx(bubble * timeline.makespan_s, abs=1e-9)


def test_equal_stages_lose_the_fill_and_the_drain_only():
    # Worker k waits k forwards for its first micro-batch and K - 1 - k stages there and back; in
    # the end for k backwards.
    for num_stages in range(1, 6):
        timeline = simulate(fill_drain(num_stages, 4), StageCosts.uniform(num_stages))
        for k, lost in enumerate(timeline.lost_time):
            fill_s = k * 1.0 + (num_stages - 1 - k) * 3.0
            assert lost == LostTime(fill_s, k * 2.0, 0.0, 0.0, 0.0)


def test_unequal_stages_lose_more_where_there_is_less_to_do():
    costs = StageCosts(forward_s=[1, 3], backward_s=[1, 3])
    light, heavy = simulate(one_f_one_b(2, 8), costs).lost_time
    assert light.imbalance_s > 0
    assert heavy.imbalance_s == 0
    assert light.transfer_s == heavy.transfer_s == 0


def test_transfers_lose_what_the_makespan_would_be_shorter_without():
    schedule = one_f_one_b(3, 6)
    slow = simulate(schedule, StageCosts.uniform(3, latency_s=0.5))
    fast = simulate(schedule, StageCosts.uniform(3))
    for lost in slow.lost_time:
        assert lost.transfer_s == slow.makespan_s - fast.makespan_s > 0
        assert lost.imbalance_s == 0


def test_recomputes_are_counted_apart_and_fill_the_bubble():
    schedule = add_recompute(fill_drain(3, 4), "always")
    timeline = simulate(schedule, StageCosts.uniform(3))
    assert [lost.recompute_s for lost in timeline.lost_time] == [4.0, 4.0, 4.0]
    # Inside the backwards they would lengthen the ramps, too: (M + K - 1)(t_F + t_R + t_B) = 24.
    assert timeline.makespan_s == 4 * 4 + 2 * 3


# ---- refusals ----------------------------------------------------------------------------------


def test_forwards_alone_can_be_simulated():
    rows = [[Action(F, stage, m) for m in range(3)] for stage in range(2)]
    timeline = simulate(Schedule(rows, 2, 3), StageCosts.uniform(2))
    assert timeline.makespan_s == 4.0
    assert [lost.idle_s for lost in timeline.lost_time] == [1.0, 1.0]


def test_refuses_costs_of_another_model():
    with pytest.raises(ValueError, match=r"are those of 3 stages, and the schedule has 2. Pass"):
        simulate(one_f_one_b(2, 2), StageCosts.uniform(3))


def test_refuses_what_never_ends():
    rows = [[Action(F, 0, 0), Action(B, 0, 0)], [Action(B, 1, 0), Action(F, 1, 0)]]
    with pytest.raises(ScheduleError, match=r"deadlocks.\nWorker 0 waits at B0.0 for B1.0"):
        simulate(Schedule(rows, 2, 1), StageCosts.uniform(2))
