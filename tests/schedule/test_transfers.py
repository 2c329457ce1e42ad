from itertools import product

import pytest

from gpipe.errors import ScheduleError
from gpipe.schedule import (
    LOOPED_SCHEDULES,
    Action,
    Kind,
    Schedule,
    Transfer,
    add_recompute,
    add_transfers,
    check,
    fill_drain,
    grid,
    interleaved_1f1b,
    one_f_one_b,
    predecessors,
    resolve,
)
from tests.schedule.blocking import runs_to_the_end
from tests.schedule.members import MODES, NAMES

F, R, B = map(Kind, "FRB")
SEND_A, RECEIVE_A, SEND_G, RECEIVE_G = map(Kind, ("A>", "A<", "G>", "G<"))


MEMBERS = list(product(NAMES, MODES))


def computing(schedule):
    rows = [[action for action in row if action.peer is None] for row in schedule.rows]
    return Schedule(rows, schedule.num_stages, schedule.num_microbatches)


def ends(schedule, worker, other):
    """What a worker exchanges with another one, in its order, each named by its send."""
    found = []
    for action in schedule.rows[worker]:
        if action.peer is not None and schedule.worker_of(action.peer) == other:
            is_send = action.kind in (SEND_A, SEND_G)
            found.append(action if is_send else action.partner)
    return found


def test_the_drawing_in_the_docstring_is_what_is_built():
    lines = [line.strip() for line in add_transfers.__doc__.splitlines()]
    drawn = [line for line in lines if line.startswith("worker ")]
    assert len(drawn) == 2
    assert drawn == grid(add_transfers(one_f_one_b(2, 2))).splitlines()


@pytest.mark.parametrize(("name", "mode"), MEMBERS)
def test_is_pure_and_leaves_the_order_of_all_else(name, mode):
    bare = add_recompute(resolve(name, 4, 5), mode)
    schedule = add_transfers(bare)
    assert computing(schedule) == bare == add_recompute(resolve(name, 4, 5), mode)
    assert add_transfers(schedule) is schedule


@pytest.mark.parametrize("name", NAMES)
def test_both_ends_keep_one_order(name):
    schedule = add_transfers(resolve(name, 4, 6), [(0, 2), (0, 3)])
    for worker, other in product(range(4), repeat=2):
        if worker != other:
            assert ends(schedule, worker, other) == ends(schedule, other, worker)


def test_sends_beside_their_producers_would_deadlock():
    # Why all rows are taken from one order: with each send right behind what it sends and each
    # receive right before what needs it, both workers of 1F1B send and wait for the other.
    rows = []
    for stage, row in enumerate(one_f_one_b(2, 4).rows):
        new = []
        for kind, _, m in row:
            if kind == F and stage == 1:
                new.append(Transfer(RECEIVE_A, 1, m, 0))
            if kind == B and stage == 0:
                new.append(Transfer(RECEIVE_G, 0, m, 1))
            new.append(Action(kind, stage, m))
            if kind == F and stage == 0:
                new.append(Transfer(SEND_A, 0, m, 1))
            if kind == B and stage == 1:
                new.append(Transfer(SEND_G, 1, m, 0))
        rows.append(new)
    schedule = Schedule(rows, 2, 4)
    assert not runs_to_the_end(schedule)
    with pytest.raises(ScheduleError):
        check(schedule)
    check(add_transfers(computing(schedule)))


def test_nothing_is_sent_between_stages_of_one_worker():
    assert not add_transfers(interleaved_1f1b(1, 3, 4), [(0, 2)]).has_transfers
    rows = [
        [Action(F, 0, 0), Action(F, 1, 0), Action(B, 1, 0), Action(B, 0, 0)],
        [Action(F, 2, 0), Action(B, 2, 0)],
    ]
    assert grid(add_transfers(Schedule(rows, 3, 1))).splitlines() == [
        "worker 0  F0.0   F1.0   A1>2.0 G1<2.0 B1.0   B0.0",
        "worker 1  A2<1.0 F2.0   B2.0   G2>1.0",
    ]


def test_a_skip_is_sent_directly_and_its_gradient_back():
    schedule = add_transfers(fill_drain(3, 1), [(0, 2), (0, 1)])
    assert schedule.skips == {(0, 2)}  # that of the neighbours travels with the boundary
    assert grid(schedule).splitlines() == [
        "worker 0  F0.0   A0>1.0 A0>2.0 G0<2.0 G0<1.0 B0.0",
        "worker 1  A1<0.0 F1.0   A1>2.0 G1<2.0 B1.0   G1>0.0",
        "worker 2  A2<0.0 A2<1.0 F2.0   B2.0   G2>1.0 G2>0.0",
    ]
    assert predecessors(Action(F, 2, 0), schedule) == (
        Transfer(RECEIVE_A, 2, 0, 1),
        Transfer(RECEIVE_A, 2, 0, 0),
    )
    assert predecessors(Action(B, 0, 0), schedule) == (
        Transfer(RECEIVE_G, 0, 0, 1),
        Transfer(RECEIVE_G, 0, 0, 2),
        Action(F, 0, 0),
    )
    check(schedule)


def test_forwards_alone_are_sent_forward():
    rows = [[Action(F, stage, m) for m in range(2)] for stage in range(2)]
    assert grid(add_transfers(Schedule(rows, 2, 2))).splitlines() == [
        "worker 0  F0.0   A0>1.0 F0.1   A0>1.1",
        "worker 1  A1<0.0 F1.0   A1<0.1 F1.1",
    ]


@pytest.mark.parametrize("skip", [(1, 1), (2, 1), (-1, 1), (0, 3)])
def test_refuses_a_skip_that_leads_nowhere(skip):
    with pytest.raises(ValueError, match=r"The skip from stage .* is none in 3 stages. Name a"):
        add_transfers(one_f_one_b(3, 2), [skip])


def test_refuses_a_skip_that_the_transfers_leave_out():
    schedule = add_transfers(one_f_one_b(3, 2))
    with pytest.raises(ValueError, match="has transfers, but none for the skip from stage 0 to"):
        add_transfers(schedule, [(0, 2)])
    with_skip = add_transfers(one_f_one_b(3, 2), [(0, 2)])
    assert add_transfers(with_skip, [(0, 2)]) is with_skip


def test_refuses_what_deadlocks_anyway():
    rows = [
        [Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)],
        [Action(F, 1, 0), Action(F, 1, 1), Action(B, 1, 1), Action(B, 1, 0)],
    ]
    with pytest.raises(ScheduleError, match=r"Worker 0 waits at B0.0 for B1.0, which never comes"):
        add_transfers(Schedule(rows, 2, 2))


def test_a_recompute_added_later_stands_before_the_wait_for_the_gradient():
    schedule = add_recompute(add_transfers(fill_drain(2, 2)), "except_last")
    assert grid(schedule).splitlines() == [
        "worker 0  F0.0   A0>1.0 F0.1   A0>1.1 G0<1.1 B0.1   R0.0   G0<1.0 B0.0",
        "worker 1  A1<0.0 F1.0   A1<0.1 F1.1   B1.1   G1>0.1 R1.0   B1.0   G1>0.0",
    ]
    check(schedule)


@pytest.mark.parametrize(("name", "mode"), MEMBERS)
def test_law_no_deadlock_in_the_strictest_run(name, mode):
    for num_workers, num_microbatches in product((1, 2, 3, 5), (1, 2, 3, 4, 7)):
        schedule = add_recompute(resolve(name, num_workers, num_microbatches), mode)
        skips = [(0, num_workers - 1)] if num_workers > 2 else []
        assert runs_to_the_end(add_transfers(schedule, skips))


@pytest.mark.parametrize("name", sorted(LOOPED_SCHEDULES))
@pytest.mark.parametrize("v", [2, 3])
def test_law_no_deadlock_with_several_stages_per_worker(name, v):
    for num_workers, num_microbatches in product((1, 2, 3, 4), (1, 2, 3, 5, 8)):
        num_stages = v * num_workers
        schedule = resolve(name, num_stages, num_microbatches, num_workers)
        skips = [(0, num_stages - 1), (0, 2)] if num_stages > 2 else []
        assert runs_to_the_end(add_transfers(schedule, skips))
