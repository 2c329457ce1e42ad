from itertools import product

import pytest

from gpipe.costs import StageCosts
from gpipe.schedule import (
    Action,
    Kind,
    check,
    interleaved_1f1b,
    one_f_one_b,
    peak_held,
    picture,
    unit_slots,
)
from gpipe.simulate import simulate

SIZES = list(product(range(1, 7), range(1, 4), range(1, 14)))


def test_the_drawing_in_the_docstring_is_what_is_built():
    lines = [line.strip() for line in interleaved_1f1b.__doc__.splitlines()]
    drawn = [line for line in lines if line.startswith("worker ")]
    assert len(drawn) == 2
    assert drawn == picture(interleaved_1f1b(2, 2, 3)).splitlines()


def test_a_full_round_has_no_gaps():
    assert picture(interleaved_1f1b(2, 2, 4)).splitlines() == [
        "worker 0  F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1  .   B2.2  .   B2."
        "3 B0.2 B0.3",
        "worker 1   .   F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1."
        "2 B1.3  .",
    ]


def test_stage_s_lives_on_worker_s_mod_k():
    schedule = interleaved_1f1b(3, 2, 4)
    assert (schedule.num_workers, schedule.num_stages) == (3, 6)
    assert [schedule.worker_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]


def test_with_one_stage_per_worker_it_is_1f1b():
    for num_workers, num_microbatches in product(range(1, 9), range(1, 25)):
        schedule = interleaved_1f1b(num_workers, 1, num_microbatches)
        assert schedule == one_f_one_b(num_workers, num_microbatches)


def test_law_the_makespan_is_that_of_the_formula():
    # (v M + K - 1)(t_F + t_B) with both of one slot; a short last round takes no longer than a
    # full one.
    for num_workers, v, num_microbatches in SIZES:
        slots = unit_slots(interleaved_1f1b(num_workers, v, num_microbatches))
        num_built = -(-num_microbatches // num_workers) * num_workers
        bound = 2 * (v * num_built + num_workers - 1)
        num_slots = 1 + max(slots.values())
        assert num_slots == bound if num_built == num_microbatches else num_slots <= bound


def test_law_what_a_worker_holds():
    for num_workers, v, num_microbatches in SIZES:
        held = peak_held(interleaved_1f1b(num_workers, v, num_microbatches))
        for worker in range(num_workers):
            behind = num_workers - 1 - worker
            bound = (v - 1) * num_workers + (2 * behind if v > 1 else behind) + 1
            bound = min(bound, v * num_microbatches)
            is_exact = num_microbatches % num_workers == 0
            assert held[worker] == bound if is_exact else held[worker] <= bound
    assert peak_held(interleaved_1f1b(4, 2, 16)) == (11, 9, 7, 5)
    assert peak_held(interleaved_1f1b(4, 1, 16)) == (4, 3, 2, 1)


def test_the_forwards_that_run_further_ahead_hide_the_transfers():
    # With K - 1 - k fewer ahead, each of these latencies would be waited for in every round, and
    # 1F1B with one stage per worker would be faster: 131.7 s and 130.6 s.
    costs = StageCosts.uniform(16, 0.5, 1.0, latency_s=0.2)
    assert simulate(interleaved_1f1b(8, 2, 32), costs).makespan_s == pytest.approx(112.5)


def test_the_surplus_is_left_out_of_the_next_multiple():
    full, short = interleaved_1f1b(4, 2, 8), interleaved_1f1b(4, 2, 5)
    for row, shorter in zip(full.rows, short.rows, strict=True):
        assert shorter == tuple(action for action in row if action.microbatch < 5)


def test_a_short_last_round_does_not_deadlock():
    # Made with rounds that are as short as what is left, 69 of 576 sizes deadlock.
    for num_workers, v, num_microbatches in product(range(1, 6), (2, 3), range(1, 8)):
        check(interleaved_1f1b(num_workers, v, num_microbatches))


@pytest.mark.parametrize("name", ["num_workers", "stages_per_worker", "num_microbatches"])
def test_refuses_impossible_sizes(name):
    sizes = {"num_workers": 2, "stages_per_worker": 2, "num_microbatches": 2}
    with pytest.raises(ValueError, match=rf"`{name}` is 0. Pass a whole number of at least 1"):
        interleaved_1f1b(**sizes | {name: 0})
    with pytest.raises(TypeError, match=rf"`{name}` is 1.5, of type float"):
        interleaved_1f1b(**sizes | {name: 1.5})


def test_rows_are_actions():
    assert interleaved_1f1b(1, 1, 1).rows == (
        (Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)),
    )
