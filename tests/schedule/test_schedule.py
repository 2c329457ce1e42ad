import pickle
from dataclasses import FrozenInstanceError

import pytest

from gpipe.schedule import Action, Kind, Schedule

F, R, B = map(Kind, "FRB")


def looped():
    """Two workers with two stages each, one micro-batch: worker 0 has stages 0 and 2."""
    rows = [
        [Action(F, 0, 0), Action(F, 2, 0), Action(B, 2, 0), Action(B, 0, 0)],
        [Action(F, 1, 0), Action(F, 3, 0), Action(R, 3, 0), Action(B, 3, 0), Action(B, 1, 0)],
    ]
    return Schedule(rows, num_stages=4, num_microbatches=1)


def test_rows_belong_to_workers_and_stages_follow_from_them():
    schedule = looped()
    assert schedule.num_workers == 2
    assert [schedule.worker_of(stage) for stage in range(4)] == [0, 1, 0, 1]
    assert [schedule.stages_of(worker) for worker in range(2)] == [(0, 2), (1, 3)]


def test_knows_what_is_recomputed():
    assert looped().recomputed == {(3, 0)}


def test_is_a_frozen_value():
    schedule = looped()
    assert schedule == looped()
    assert hash(schedule) == hash(looped())
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert schedule != Schedule(schedule.rows, 4, 2)
    assert type(schedule.rows) is type(schedule.rows[0]) is tuple
    with pytest.raises(FrozenInstanceError):
        schedule.num_stages = 5


def test_a_stage_on_two_workers_is_found_on_the_first():
    schedule = Schedule([[Action(F, 0, 0)], [Action(B, 0, 0)]], 1, 1)
    assert schedule.worker_of(0) == 0


def test_names_an_unknown_stage():
    with pytest.raises(ValueError, match=r"Stage 4 stands in no row. Ask for one of \[0, 1, 2, 3"):
        looped().worker_of(4)


@pytest.mark.parametrize("item", ["F0.0", ("F", 0, 0), Action("F", 0, 0), None])
def test_refuses_what_is_no_action(item):
    with pytest.raises(TypeError, match=r"row of worker 1 holds .* Write Action\(kind, stage"):
        Schedule([[Action(F, 0, 0)], [item]], 1, 1)


def test_refuses_impossible_sizes():
    with pytest.raises(ValueError, match=r"`num_stages` is 0. Pass a whole number of at least 1"):
        Schedule([], 0, 1)
    with pytest.raises(TypeError, match=r"`num_microbatches` is 2.0, of type float. Pass a whole"):
        Schedule([], 1, 2.0)
