import pytest

from gpipe.errors import ScheduleError
from gpipe.schedule import (
    LOOPED_SCHEDULES,
    SCHEDULE_NAMES,
    SCHEDULES,
    as_schedule,
    fill_drain,
    interleaved_1f1b,
    looped_breadth_first,
    one_f_one_b,
    resolve,
)


def test_names_stand_for_builders():
    assert {"fill_drain": fill_drain, "1f1b": one_f_one_b}.items() <= SCHEDULES.items()
    looped = {
        "interleaved_1f1b": interleaved_1f1b,
        "looped_breadth_first": looped_breadth_first,
    }
    assert looped.items() <= LOOPED_SCHEDULES.items()
    assert set(SCHEDULE_NAMES) == {*SCHEDULES, *LOOPED_SCHEDULES}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_name_becomes_a_schedule(name):
    assert resolve(name, 3, 4) == resolve(name, 3, 4, 3) == SCHEDULES[name](3, 4)


@pytest.mark.parametrize("name", sorted(LOOPED_SCHEDULES))
def test_a_name_shares_out_the_stages(name):
    assert resolve(name, 6, 4, 3) == LOOPED_SCHEDULES[name](3, 2, 4)
    assert resolve(name, 3, 4) == LOOPED_SCHEDULES[name](3, 1, 4)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_refuses_stages_that_cannot_be_shared_out(name):
    with pytest.raises(ValueError, match=r"5 stages cannot be shared evenly by 2 workers. Make"):
        resolve(name, 5, 4, 2)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_refuses_several_stages_per_worker_where_there_is_one(name):
    with pytest.raises(
        ValueError,
        match=f"'{name}' has one stage per worker, and there are 4 stages on 2 workers. "
        "Use 'interleaved_1f1b' or",
    ):
        resolve(name, 4, 4, 2)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("filldrain", "fill_drain"),
        ("1F1B", "1f1b"),
        ("1f1", "1f1b"),
        ("interleaved", "interleaved_1f1b"),
    ],
)
def test_an_unknown_name_is_told_the_nearest(name, nearest):
    with pytest.raises(
        ValueError,
        match=f"`schedule` is '{name}'. Use one of 'fill_drain', '1f1b'.*nearest: '{nearest}'",
    ):
        resolve(name, 3, 4)


def test_refuses_other_types_and_sizes():
    with pytest.raises(
        TypeError, match=r"`schedule` is 3, of type int. Use one of 'fill_drain', '1f1b'"
    ):
        resolve(3, 3, 4)
    with pytest.raises(ValueError, match="`num_microbatches` is 0"):
        resolve("1f1b", 3, 0)
    with pytest.raises(ValueError, match="`num_workers` is 0"):
        resolve("interleaved_1f1b", 4, 4, 0)


def test_a_spec_is_a_name_a_schedule_or_a_function():
    schedule = one_f_one_b(3, 4)
    assert as_schedule("1f1b", 3, 4) == schedule
    assert as_schedule("interleaved_1f1b", 6, 4, 3) == interleaved_1f1b(3, 2, 4)
    assert as_schedule(schedule, 3, 4) is schedule
    assert as_schedule(one_f_one_b, 3, 4, 3) == schedule


@pytest.mark.parametrize("spec", [one_f_one_b(3, 4), lambda *_: one_f_one_b(3, 4)])
def test_a_schedule_of_other_sizes_is_told_both(spec):
    with pytest.raises(
        ScheduleError,
        match=r"is for 3 stages, 4 micro-batches and 3 workers; this model runs with "
        r"3 stages, 5 micro-batches and 3 workers. Build",
    ):
        as_schedule(spec, 3, 5)
    with pytest.raises(ScheduleError, match="runs with 4 stages, 4 micro-batches and 2 workers"):
        as_schedule(spec, 4, 4, 2)
    with pytest.raises(ScheduleError, match="runs with 3 stages, 4 micro-batches and 1 workers"):
        as_schedule(spec, 3, 4, 1)


def test_a_function_must_return_a_schedule():
    def mine(num_stages, num_microbatches):
        return [num_stages, num_microbatches]

    with pytest.raises(
        TypeError, match=r"mine\(3, 4\) returned \[3, 4\], of type list. Let it return a Schedule."
    ):
        as_schedule(mine, 3, 4)
    with pytest.raises(TypeError, match=r"`schedule` is 7, of type int. Use one of 'fill_drain'"):
        as_schedule(7, 3, 4)
