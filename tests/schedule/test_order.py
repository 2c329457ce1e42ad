import pytest

from gpipe.schedule import SCHEDULES, Action, Kind, Schedule, add_recompute, predecessors
from gpipe.schedule.order import Wait, run_order

F, R, B = Kind


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_keeps_every_row_and_every_predecessor(name, mode):
    schedule = add_recompute(SCHEDULES[name](4, 6), mode)
    order = run_order(schedule)
    assert order.waits == []
    for worker, row in enumerate(schedule.rows):
        ran = [action for action in order.actions if schedule.worker_of(action.stage) == worker]
        assert ran == list(row)
    place = {action: index for index, action in enumerate(order.actions)}
    for action in order.actions:
        assert all(place[other] < place[action] for other in predecessors(action, schedule))


def test_stops_where_nobody_can_move():
    rows = [
        [Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)],
        [Action(F, 1, 0), Action(F, 1, 1), Action(B, 1, 1), Action(B, 1, 0)],
    ]
    order = run_order(Schedule(rows, 2, 2))
    assert order.actions == [Action(F, 0, 0), Action(F, 1, 0)]
    assert order.waits == [
        Wait(0, Action(B, 0, 0), missing=Action(B, 1, 0)),
        Wait(1, Action(F, 1, 1), missing=Action(F, 0, 1)),
    ]


def test_empty_rows_are_done_at_once():
    assert run_order(Schedule([[], []], 1, 1)) == ([], [])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_looks_at_an_action_once_and_once_more_for_each_wait(name, monkeypatch):
    # What makes it linear, whatever the sizes: nobody polls. An action has two predecessors at
    # most, hence two waits.
    looked_at = []

    def counting(action, schedule):
        looked_at.append(action)
        return predecessors(action, schedule)

    monkeypatch.setattr("gpipe.schedule.order.predecessors", counting)
    run_order(SCHEDULES[name](8, 100))
    assert len(looked_at) <= 3 * (8 * 100 * 2)
