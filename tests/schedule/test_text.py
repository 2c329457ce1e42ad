from itertools import product

import pytest

from gpipe.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    add_recompute,
    fill_drain,
    grid,
    one_f_one_b,
    picture,
    unit_slots,
)

F, R, B = map(Kind, "FRB")
SIZES = list(product(range(1, 9), range(1, 25)))


def num_slots(schedule):
    return 1 + max(unit_slots(schedule).values())


def test_the_grid_has_one_line_per_worker_and_no_times():
    assert grid(one_f_one_b(2, 2)).splitlines() == [
        "worker 0  F0.0 F0.1 B0.0 B0.1",
        "worker 1  F1.0 B1.0 F1.1 B1.1",
    ]


def test_marked_actions_get_a_star():
    marked = {Action(F, 1, 1), Action(B, 0, 0)}
    assert grid(one_f_one_b(2, 2), marked).splitlines() == [
        "worker 0  F0.0  F0.1  B0.0* B0.1",
        "worker 1  F1.0  B1.0  F1.1* B1.1",
    ]


def test_reach_shows_each_row_around_its_first_marked_action():
    schedule = fill_drain(2, 4)
    assert grid(schedule, {Action(B, 0, 3)}, reach=1).splitlines() == [
        "worker 0  ...   F0.3  B0.3* B0.2  ...",
        "worker 1  F1.0  F1.1  ...",
    ]
    assert grid(schedule, {Action(B, 0, 3)}, reach=100) == grid(schedule, {Action(B, 0, 3)})


def test_columns_line_up_whatever_the_number_of_digits():
    lines = grid(fill_drain(11, 12)).splitlines()
    assert lines[0].startswith("worker 0   F0.0   F0.1 ")
    assert lines[10].startswith("worker 10  F10.0  F10.1 ")
    assert len({len(line.split()) for line in lines}) == 1


def test_empty_schedules_can_be_drawn():
    assert grid(Schedule([[]], 1, 1)) == picture(Schedule([[]], 1, 1)) == "worker 0"
    assert grid(Schedule([], 1, 1)) == picture(Schedule([], 1, 1)) == ""


def test_the_picture_shows_bubbles_as_dots():
    assert picture(one_f_one_b(2, 2)).splitlines() == [
        "worker 0  F0.0 F0.1  .   B0.0  .   B0.1",
        "worker 1   .   F1.0 B1.0 F1.1 B1.1  .",
    ]


def test_the_picture_leaves_out_what_can_never_run():
    rows = [[Action(F, 0, 0), Action(B, 0, 0)], [Action(B, 1, 0), Action(F, 1, 0)]]
    assert picture(Schedule(rows, 2, 1)).splitlines() == ["worker 0  F0.0", "worker 1   ."]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_action_has_one_slot_and_every_slot_one_action_of_a_worker(name):
    schedule = add_recompute(SCHEDULES[name](3, 5), "always")
    slots = unit_slots(schedule)
    for row in schedule.rows:
        taken = [slots[action] for action in row]
        assert taken == sorted(set(taken))


@pytest.mark.parametrize("name", ["fill_drain", "1f1b"])
def test_law_the_makespan_is_that_of_the_formula(name):
    # (M + K - 1) (t_F + t_B), both of one slot.
    for num_stages, num_microbatches in SIZES:
        schedule = SCHEDULES[name](num_stages, num_microbatches)
        assert num_slots(schedule) == 2 * (num_microbatches + num_stages - 1)


def test_law_recompute_is_pulled_ahead_into_the_bubble():
    # Each of the M micro-batches costs one slot more, but none of the K - 1 slots of the ramps
    # does: with the recompute inside the backward it would be 3 (M + K - 1).
    for num_stages, num_microbatches in SIZES:
        schedule = add_recompute(fill_drain(num_stages, num_microbatches), "always")
        assert num_slots(schedule) == 3 * num_microbatches + 2 * (num_stages - 1)
