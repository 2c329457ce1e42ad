from itertools import product

import pytest

from gpipe.schedule import fill_drain, looped_breadth_first, peak_held, picture, unit_slots


def test_the_drawing_in_the_docstring_is_what_is_built():
    lines = [line.strip() for line in looped_breadth_first.__doc__.splitlines()]
    drawn = [line for line in lines if line.startswith("worker ")]
    assert len(drawn) == 2
    assert drawn == picture(looped_breadth_first(2, 2, 3)).splitlines()


def test_with_one_stage_per_worker_it_is_fill_drain():
    for num_workers, num_microbatches in product(range(1, 9), range(1, 25)):
        schedule = looped_breadth_first(num_workers, 1, num_microbatches)
        assert schedule == fill_drain(num_workers, num_microbatches)


def test_all_of_a_group_run_before_the_next_and_backwards_are_the_mirror_image():
    for row in looped_breadth_first(3, 3, 4).rows:
        fill, drain = row[:12], row[12:]
        pairs = [(action.stage, action.microbatch) for action in fill]
        assert {action.kind for action in fill} == {"F"}
        assert {action.kind for action in drain} == {"B"}
        assert pairs == sorted(pairs)
        assert [(action.stage, action.microbatch) for action in drain] == pairs[::-1]


def test_holds_everything_at_the_turn():
    assert peak_held(looped_breadth_first(3, 2, 5)) == (10, 10, 10)


def test_law_the_bubble_is_that_of_small_steps_where_the_pipe_stays_full():
    for num_workers, v, num_microbatches in product(range(1, 6), range(1, 4), range(1, 14)):
        slots = unit_slots(looped_breadth_first(num_workers, v, num_microbatches))
        # A group waits for the micro-batch to come round if there are fewer of them than workers.
        per_group = max(num_microbatches, num_workers)
        steps = (v - 1) * per_group + num_microbatches + num_workers - 1
        assert 1 + max(slots.values()) == 2 * steps


@pytest.mark.parametrize("name", ["num_workers", "stages_per_worker", "num_microbatches"])
def test_refuses_impossible_sizes(name):
    sizes = {"num_workers": 2, "stages_per_worker": 2, "num_microbatches": 2}
    with pytest.raises(ValueError, match=rf"`{name}` is -1. Pass a whole number of at least 1"):
        looped_breadth_first(**sizes | {name: -1})
