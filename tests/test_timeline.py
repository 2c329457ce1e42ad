from itertools import product

import pytest

from gpipe.schedule import SCHEDULES, Action, Kind, Transfer, unit_slots
from gpipe.timeline import Event, HeldBytes, LostTime, Timeline, ideal_bubble

F, R, B = map(Kind, "FRB")


def unit_timeline(schedule, offset_s=0.0):
    slots = unit_slots(schedule).items()
    events = [
        Event(schedule.worker_of(action.stage), action, offset_s + slot, offset_s + slot + 1)
        for action, slot in slots
    ]
    return Timeline(events, schedule.num_workers)


@pytest.mark.parametrize("name", ["fill_drain", "1f1b"])
def test_law_makespan_and_bubble_are_those_of_the_formulas(name):
    for num_stages, num_microbatches in product(range(1, 9), range(1, 25)):
        timeline = unit_timeline(SCHEDULES[name](num_stages, num_microbatches))
        assert timeline.makespan_s == 2 * (num_microbatches + num_stages - 1)
        assert timeline.bubble == pytest.approx(ideal_bubble(num_stages, num_microbatches))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_rows_are_those_of_the_schedule(name):
    schedule = SCHEDULES[name](4, 6)
    assert unit_timeline(schedule).rows == schedule.rows


def test_the_clock_may_start_anywhere():
    schedule = SCHEDULES["1f1b"](3, 4)
    late = unit_timeline(schedule, offset_s=1000.0)
    assert late.makespan_s == unit_timeline(schedule).makespan_s
    assert late.bubble == unit_timeline(schedule).bubble


def test_events_are_sorted_by_start_then_end_then_worker():
    events = [
        Event(1, Action(F, 1, 0), 1.0, 2.0),
        Event(0, Action(F, 0, 1), 1.0, 2.0),
        Event(0, Action(R, 0, 0), 1.0, 1.0),
        Event(0, Action(F, 0, 0), 0.0, 1.0),
    ]
    timeline = Timeline(events, num_workers=2)
    assert timeline.events == tuple(reversed(events))
    assert timeline == Timeline(tuple(reversed(events)), 2)


def test_an_idle_worker_is_all_bubble():
    timeline = Timeline((Event(0, Action(F, 0, 0), 0.0, 3.0),), num_workers=2)
    assert timeline.bubble == 0.5
    assert timeline.rows == ((Action(F, 0, 0),), ())


def test_empty_and_instant_timelines_have_no_bubble():
    instant = Timeline((Event(0, Action(F, 0, 0), 5.0, 5.0),), num_workers=1)
    for timeline in (Timeline((), num_workers=3), instant):
        assert timeline.makespan_s == timeline.bubble == 0.0


def test_a_full_timeline_has_no_negative_bubble():
    # Ten times 0.1 s on one worker sum to less or more than the makespan, by rounding.
    ends = [0.1 * step for step in range(11)]
    events = [Event(0, Action(F, 0, i), ends[i], ends[i + 1]) for i in range(10)]
    assert 0 <= Timeline(events, 1).bubble < 1e-12


def test_refuses_impossible_events():
    action = Action(F, 0, 0)
    with pytest.raises(ValueError, match=r"F0.0 ran on worker 2 of 2. Count workers from 0"):
        Timeline((Event(2, action, 0.0, 1.0),), 2)
    with pytest.raises(ValueError, match=r"F0.0 starts at 2.0 s and ends at 1.0 s. Take both"):
        Timeline((Event(0, action, 2.0, 1.0),), 2)
    with pytest.raises(ValueError, match=r"F0.0 starts at nan s"):
        Timeline((Event(0, action, float("nan"), 1.0),), 2)
    with pytest.raises(ValueError, match=r"`num_workers` is 0"):
        Timeline((), 0)


def test_ideal_bubble():
    assert ideal_bubble(1, 7) == 0.0
    assert ideal_bubble(4, 4) == 3 / 7
    assert ideal_bubble(8, 32) == pytest.approx(0.18, abs=0.001)  # "negligible", says the paper
    with pytest.raises(ValueError, match="`num_stages` is 0"):
        ideal_bubble(0, 4)
    with pytest.raises(TypeError, match=r"`num_microbatches` is 4.0"):
        ideal_bubble(4, 4.0)


def test_transfers_are_events_that_keep_nobody_busy():
    events = [
        Event(0, Action(F, 0, 0), 0.0, 1.0),
        Event(0, Transfer(Kind.SEND_ACTIVATION, 0, 0, 1), 1.0, 3.0),
        Event(1, Transfer(Kind.RECEIVE_ACTIVATION, 1, 0, 0), 1.0, 3.0),
        Event(1, Action(F, 1, 0), 3.0, 4.0),
    ]
    timeline = Timeline(tuple(events), 2)
    assert timeline.worker_bubbles == (0.75, 0.75)
    assert timeline.bubble == 0.75
    assert timeline.rows == ((Action(F, 0, 0),), (Action(F, 1, 0),))


def test_a_measured_timeline_has_no_bytes():
    timeline = Timeline((Event(0, Action(F, 0, 0), 0.0, 3.0),), num_workers=1)
    assert timeline.held_bytes is timeline.peak_bytes is timeline.lost_time is None


def test_the_peak_is_the_highest_level_of_each_worker():
    held = (HeldBytes((0.0, 1.0, 2.0), (3.0, 7.0, 0.0)), HeldBytes((), ()))
    assert Timeline((), 2, held).peak_bytes == (7.0, 0)


def test_lost_time_is_idle_time_and_recompute():
    assert LostTime(1.0, 2.0, 3.0, 4.0, 5.0).idle_s == 10.0
