from itertools import chain

import pytest

from gpipe.schedule import (
    Action,
    Kind,
    Schedule,
    add_recompute,
    add_transfers,
    fill_drain,
    one_f_one_b,
    predecessors,
    resolve,
)
from gpipe.schedule.graph import graph_of
from gpipe.schedule.order import Order, Wait, run
from tests.schedule.members import NAMES

F, R, B = map(Kind, "FRB")


def carried_out(schedule, order):
    """The actions in the order of the turns."""
    rows = [list(row) for row in schedule.rows]
    places = [0] * len(rows)
    for worker, stop in order.turns:
        yield from rows[worker][places[worker] : stop]
        places[worker] = stop


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_keeps_every_row_and_every_predecessor(name, mode):
    schedule = add_recompute(resolve(name, 4, 6), mode)
    order = run(graph_of(schedule))
    assert order.waits == []
    ran = list(carried_out(schedule, order))
    for worker, row in enumerate(schedule.rows):
        assert [each for each in ran if schedule.worker_of(each.stage) == worker] == list(row)
    place = {action: index for index, action in enumerate(ran)}
    for action in ran:
        assert all(place[other] < place[action] for other in predecessors(action, schedule))


def test_stops_where_nobody_can_move():
    rows = [
        [Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)],
        [Action(F, 1, 0), Action(F, 1, 1), Action(B, 1, 1), Action(B, 1, 0)],
    ]
    schedule = Schedule(rows, 2, 2)
    order = run(graph_of(schedule))
    assert list(carried_out(schedule, order)) == [Action(F, 0, 0), Action(F, 1, 0)]
    assert order.waits == [
        Wait(0, Action(B, 0, 0), missing=Action(B, 1, 0)),
        Wait(1, Action(F, 1, 1), missing=Action(F, 0, 1)),
    ]


def test_empty_rows_are_done_at_once():
    assert run(graph_of(Schedule([[], []], 1, 1))) == Order([(0, 0), (1, 0)], [])


@pytest.mark.parametrize("name", NAMES)
def test_the_rule_is_asked_per_lane_and_nobody_polls(name, monkeypatch):
    # What makes it linear, whatever the sizes. An action waits at most once for each of the two
    # or three others that it needs, so that there are few turns.
    asked = []

    def counting(action, schedule):
        asked.append(action)
        return predecessors(action, schedule)

    monkeypatch.setattr("gpipe.schedule.graph.predecessors", counting)
    schedule = add_transfers(resolve(name, 8, 100, None))
    graph = graph_of(schedule)
    assert len(asked) <= 2 * 8 * (3 + 4)
    num_actions = sum(map(len, schedule.rows))
    assert len(run(graph).turns) <= num_actions + 2 * 8


@pytest.mark.parametrize("build", [fill_drain, one_f_one_b])
@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("skips", [[], [(0, 2), (0, 3)]])
def test_the_graph_says_of_every_action_what_the_rule_says(build, mode, skips):
    # The rule is asked for a lane; this asks it for every action.
    bare = add_recompute(build(4, 5), mode)
    for schedule in (bare, add_transfers(bare, skips)):
        graph = graph_of(schedule)
        for worker, row in enumerate(schedule.rows):
            for place, action in enumerate(row):
                number = int(graph.numbers[worker][place])
                assert graph.action(number) == action
                needs = graph.needs[schedule.lane_rows[worker][place]]
                found = {
                    graph.action(number + need)
                    for need in needs
                    if number + need not in graph.given
                }
                assert found | optional(action, schedule) == awaited(action, schedule)


def awaited(action, schedule):
    """What the rule says, carried out as strictly as it may be."""
    if action.kind in ("A<", "G<"):
        return set()
    others = predecessors(action, schedule)
    if action.peer is not None:
        return {*others, action.partner}
    return {other if other.peer is None else other.partner for other in others} | optional(
        action, schedule
    )


def optional(action, schedule):
    """Where only some are recomputed, a backward also waits for its forward: no difference."""
    is_mixed = len(schedule.recomputed_in(action.stage)) not in (0, schedule.num_microbatches)
    return {Action(F, *action[1:])} if action.kind == B and is_mixed else set()


def test_turns_name_every_action_once():
    schedule = add_transfers(one_f_one_b(3, 4))
    ran = list(carried_out(schedule, run(graph_of(schedule))))
    assert sorted(map(str, ran)) == sorted(map(str, chain.from_iterable(schedule.rows)))
