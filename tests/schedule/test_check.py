import re
from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe.errors import ScheduleError
from gpipe.schedule import (
    LOOPED_SCHEDULES,
    RECOMPUTE_MODES,
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    Transfer,
    add_recompute,
    add_transfers,
    check,
    fill_drain,
    interleaved_1f1b,
    one_f_one_b,
    peak_held,
)
from tests.schedule.blocking import runs_to_the_end
from tests.schedule.members import builders

F, R, B = map(Kind, "FRB")
MEMBERS = list(product(sorted(SCHEDULES), RECOMPUTE_MODES))
all_members = pytest.mark.parametrize(("name", "mode"), MEMBERS)


# ---- an oracle that shares no code with the package: the rules again, polled by brute force ----


def may_run(action, done, everything, num_stages):
    kind, stage, microbatch = action
    if kind == F:
        return stage == 0 or (F, stage - 1, microbatch) in done
    if kind == R:
        return (F, stage, microbatch) in done
    has_gradient = stage == num_stages - 1 or (B, stage + 1, microbatch) in done
    dropped = (R, stage, microbatch) in everything
    return has_gradient and ((R if dropped else F), stage, microbatch) in done


def finishes(schedule):
    rows = [list(row) for row in schedule.rows]
    everything = {action for row in rows for action in row}
    done = set()
    while any(rows):
        movable = [
            row for row in rows if row and may_run(row[0], done, everything, schedule.num_stages)
        ]
        if not movable:
            return False
        done.update(row.pop(0) for row in movable)
    return True


def is_complete(schedule):
    counts = Counter(action for row in schedule.rows for action in row)
    pairs = list(product(range(schedule.num_stages), range(schedule.num_microbatches)))
    needed = {Action(kind, *pair) for pair in pairs for kind in (F, B)}
    allowed = needed | {Action(R, *pair) for pair in pairs}
    return needed <= counts.keys() <= allowed and set(counts.values()) == {1}


def lives_on_one_worker_each(schedule):
    homes = {(action.stage, worker) for worker, row in enumerate(schedule.rows) for action in row}
    return len(homes) == len({stage for stage, _ in homes})


def is_valid(schedule):
    return is_complete(schedule) and lives_on_one_worker_each(schedule) and finishes(schedule)


def is_accepted(schedule):
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True


def changed(schedule, change):
    rows = [list(row) for row in schedule.rows]
    change(rows)
    return Schedule(rows, schedule.num_stages, schedule.num_microbatches)


def places(schedule):
    return [
        (worker, place) for worker, row in enumerate(schedule.rows) for place in range(len(row))
    ]


# ---- laws over all members ---------------------------------------------------------------------


@all_members
def test_law_every_builder_passes_in_every_mode_and_size(name, mode):
    for num_stages, num_microbatches in product(range(1, 9), range(1, 25)):
        check(add_recompute(SCHEDULES[name](num_stages, num_microbatches), mode))


@pytest.mark.parametrize("mode", RECOMPUTE_MODES)
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(LOOPED_SCHEDULES))
def test_law_several_stages_per_worker_pass_too(name, v, mode):
    for num_workers, num_microbatches in product((1, 2, 3, 5, 8), (1, 2, 3, 7, 8, 9, 24)):
        schedule = LOOPED_SCHEDULES[name](num_workers, v, num_microbatches)
        check(add_recompute(schedule, mode))


@pytest.mark.slow
@pytest.mark.parametrize("mode", RECOMPUTE_MODES)
@pytest.mark.parametrize("num_workers", range(1, 9))
def test_law_every_size_of_every_builder_passes(num_workers, mode):
    for *_, schedule in builders([num_workers], (1, 2, 3), range(1, 25)):
        assert check(add_recompute(schedule, mode)) == peak_held(schedule)
        lowered = add_transfers(add_recompute(schedule, mode))
        assert runs_to_the_end(lowered)


@pytest.mark.parametrize("mode", RECOMPUTE_MODES)
def test_law_what_a_worker_holds(mode):
    for num_stages, num_microbatches in product(range(1, 9), range(1, 25)):
        filled = add_recompute(fill_drain(num_stages, num_microbatches), mode)
        in_turn = add_recompute(one_f_one_b(num_stages, num_microbatches), mode)
        bounds = range(num_stages, 0, -1)
        assert peak_held(filled) == (num_microbatches,) * num_stages
        assert peak_held(in_turn) == tuple(min(bound, num_microbatches) for bound in bounds)


# ---- mutations: each is refused, or the oracle proves it another valid schedule -----------------


@all_members
def test_dropping_an_action_is_refused(name, mode):
    schedule = add_recompute(SCHEDULES[name](3, 4), mode)
    for worker, place in places(schedule):
        mutant = changed(schedule, lambda rows, w=worker, p=place: rows[w].pop(p))
        dropped = schedule.rows[worker][place]
        # Without its recompute a micro-batch simply keeps its activations.
        assert is_accepted(mutant) == is_valid(mutant) == (dropped.kind == R)


@all_members
def test_doubling_an_action_is_refused_wherever_it_is_put(name, mode):
    schedule = add_recompute(SCHEDULES[name](3, 4), mode)
    for worker, place in places(schedule):
        twin = schedule.rows[worker][place]
        for target in (0, place, place + 1, len(schedule.rows[worker])):
            mutant = changed(
                schedule, lambda rows, w=worker, t=target, a=twin: rows[w].insert(t, a)
            )
            with pytest.raises(ScheduleError, match=rf"{twin} stands 2 times, on worker {worker}"):
                check(mutant)


@all_members
def test_swapping_two_actions_is_refused_or_another_valid_order(name, mode):
    schedule = add_recompute(SCHEDULES[name](3, 4), mode)
    verdicts = Counter()
    for (worker, place), (other, there) in combinations(places(schedule), 2):

        def swap(rows, w=worker, p=place, o=other, t=there):
            rows[w][p], rows[o][t] = rows[o][t], rows[w][p]

        mutant = changed(schedule, swap)
        verdicts[is_accepted(mutant)] += 1
        assert is_accepted(mutant) == is_valid(mutant)
        assert worker == other or not is_accepted(mutant)
    assert verdicts[False] > verdicts[True]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_accepts_exactly_what_the_oracle_runs_to_the_end(data):
    name, mode = data.draw(st.sampled_from(MEMBERS))
    num_stages, num_microbatches = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    schedule = add_recompute(SCHEDULES[name](num_stages, num_microbatches), mode)
    rows = [data.draw(st.permutations(row)) for row in schedule.rows]
    shuffled = Schedule(rows, num_stages, num_microbatches)
    assert is_accepted(shuffled) == is_valid(shuffled)


def test_a_worker_may_own_several_stages():
    rows = [
        [Action(F, 0, 0), Action(F, 2, 0), Action(B, 2, 0), Action(B, 0, 0)],
        [Action(F, 1, 0), Action(F, 3, 0), Action(B, 3, 0), Action(B, 1, 0)],
    ]
    check(Schedule(rows, 4, 1))
    rows[0][0], rows[0][1] = rows[0][1], rows[0][0]
    with pytest.raises(ScheduleError, match=r"deadlocks"):
        check(Schedule(rows, 4, 1))


# ---- messages: the fact, its values, the remedy -------------------------------------------------


def refusal(rows, num_stages, num_microbatches):
    with pytest.raises(ScheduleError) as caught:
        check(Schedule(rows, num_stages, num_microbatches))
    return str(caught.value)


def test_all_mistakes_are_named_at_once():
    rows = [list(row) for row in one_f_one_b(2, 2).rows] + [[]]
    rows[0].pop()
    rows[0][:1] = [Action(B, 1, 0), Action(F, 0, 5)]
    rows[1][0], rows[1][1] = rows[1][1], rows[1][0]
    assert refusal(rows, 2, 2).splitlines() == [
        "The schedule (2 stages, 2 micro-batches) is wrong.",
        "F0.0 stands in no row. Add it to that of the worker of its stage.",
        "B0.1 stands in no row. Add it to that of the worker of its stage.",
        "B1.0 stands 2 times, on workers 0 and 1. Keep one.",
        "F0.5 lies outside 2 stages and 2 micro-batches, counted from 0. Leave it out.",
        "The row of worker 2 is empty. Leave it out.",
        "Stage 1 lives on workers 0 and 1. Move it to one of them.",
        "B1.0 stands before F1.0 on worker 1. Move it behind.",
        "The rows (* marks the actions above):",
        "worker 0  B1.0* F0.5* F0.1  B0.0",
        "worker 1  B1.0* F1.0  F1.1  B1.1",
        "worker 2",
    ]


def test_forwards_alone_are_incomplete():
    message = refusal([[Action(F, 0, 0)], [Action(F, 1, 0)]], 2, 1)
    assert "B0.0 stands in no row." in message
    assert "B1.0 stands in no row." in message


def test_a_backward_before_its_recompute_is_disordered():
    message = refusal([[Action(F, 0, 0), Action(B, 0, 0), Action(R, 0, 0)]], 1, 1)
    assert "B0.0 stands before R0.0 on worker 0. Move it behind." in message


def test_a_deadlock_names_who_waits_for_what_and_marks_it():
    # Worker 0 wants the first gradient before it sends the second micro-batch; worker 1 wants
    # both micro-batches before it returns a gradient.
    rows = [
        [Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)],
        [Action(F, 1, 0), Action(F, 1, 1), Action(B, 1, 1), Action(B, 1, 0)],
    ]
    assert refusal(rows, 2, 2).splitlines() == [
        "The schedule (2 stages, 2 micro-batches) deadlocks.",
        "Worker 0 waits at B0.0 for B1.0, which never comes. Move B0.0 back or B1.0 forward.",
        "Worker 1 waits at F1.1 for F0.1, which never comes. Move F1.1 back or F0.1 forward.",
        "The rows (* marks the actions above):",
        "worker 0  F0.0  B0.0* F0.1  B0.1",
        "worker 1  F1.0  F1.1* B1.1  B1.0",
    ]


def test_the_message_stays_readable_when_everything_is_wrong():
    rows = [row[:1000] for row in fill_drain(4, 1000).rows]
    message = refusal(rows, 4, 1000)
    assert "And 3980 more mistakes." in message
    assert re.search(r"^worker 3  F3\.0 .* \.\.\.$", message, re.MULTILINE)
    assert len(message) < 5000


def test_tells_the_most_micro_batches_that_each_worker_holds():
    assert check(one_f_one_b(4, 8)) == check(add_transfers(one_f_one_b(4, 8))) == (4, 3, 2, 1)


# ---- transfers ----------------------------------------------------------------------------------

SEND, RECEIVE = Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION


def sent(num_stages=2, num_microbatches=2):
    return [list(row) for row in add_transfers(one_f_one_b(num_stages, num_microbatches)).rows]


def test_mistakes_with_transfers_are_named_at_once():
    rows = sent()
    rows[0].remove(Transfer(SEND, 0, 1, 1))
    rows[1].insert(0, Transfer(RECEIVE, 1, 0, 0))
    rows[1] += [Transfer(RECEIVE, 1, 7, 0), Transfer(SEND, 1, 0, 0), Transfer(SEND, 0, 0, 5)]
    told = refusal(rows, 2, 2).splitlines()
    assert told[:5] == [
        "The schedule (2 stages, 2 micro-batches) is wrong.",
        "A0>1.1 stands in no row. Add it to that of the worker of its stage.",
        "A1<0.0 stands 2 times, on worker 1. Keep one.",
        "A1<0.7 lies outside 2 stages and 2 micro-batches, counted from 0. Leave it out.",
        "A1>0.0 leads the wrong way: gradients go to earlier stages, activations to later. "
        "Leave it out.",
    ]
    assert "A0>5.0 lies outside 2 stages and 2 micro-batches, counted from 0. Leave it out." in told


def test_a_transfer_within_a_worker_has_nowhere_to_go():
    rows = [list(row) for row in add_transfers(interleaved_1f1b(2, 2, 1)).rows]
    rows[0].append(Transfer(SEND, 0, 0, 2))
    assert "A0>2.0 has nowhere to go: both stages live on worker 0. Leave it out." in refusal(
        rows, 4, 1
    )


def test_two_receives_in_the_other_order_cross():
    rows = [list(row) for row in add_transfers(fill_drain(2, 2)).rows]
    assert [str(action) for action in rows[1][:3]] == ["A1<0.0", "F1.0", "A1<0.1"]
    rows[1][:3] = [rows[1][2], rows[1][0], rows[1][1]]
    assert refusal(rows, 2, 2).splitlines() == [
        "The schedule (2 stages, 2 micro-batches) is wrong.",
        "Workers 0 and 1 disagree on what comes next between them: A0>1.0 on worker 0, A1<0.1 on "
        "worker 1. Put their transfers in the same order.",
        "The rows (* marks the actions above):",
        "worker 0  F0.0    A0>1.0* F0.1    A0>1.1  G0<1.1  B0.1    G0<1.0  B0.0",
        "worker 1  A1<0.1* A1<0.0  F1.0    F1.1    B1.1    G1>0.1  B1.0    G1>0.0",
    ]


def test_memory_does_not_grow_with_a_slip_of_the_pen():
    rows = [[Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 10**12)]]
    assert "F0.1000000000000 lies outside 1 stages and 1 micro-batches" in refusal(rows, 1, 1)


def test_all_sending_first_in_a_circle_is_a_deadlock():
    # CASES 27: three workers each want to be rid of an activation before they post the receive
    # for which the one before them waits. It only runs where sends are buffered.
    schedule = add_transfers(interleaved_1f1b(3, 2, 3))
    rows = [list(row) for row in schedule.rows]
    for worker, (send, receive) in enumerate(
        [
            (Transfer(SEND, 0, 2, 1), Transfer(RECEIVE, 3, 0, 2)),
            (Transfer(SEND, 1, 1, 2), Transfer(RECEIVE, 1, 2, 0)),
            (Transfer(SEND, 2, 0, 3), Transfer(RECEIVE, 2, 1, 1)),
        ]
    ):
        rows[worker].remove(receive)
        rows[worker].insert(rows[worker].index(send) + 1, receive)
    told = refusal(rows, 6, 3).splitlines()
    assert told[:4] == [
        "The schedule (6 stages, 3 micro-batches) deadlocks.",
        "Worker 0 waits at A0>1.2 for A1<0.2, which never comes. Move A0>1.2 back or A1<0.2 "
        "forward.",
        "Worker 1 waits at A1>2.1 for A2<1.1, which never comes. Move A1>2.1 back or A2<1.1 "
        "forward.",
        "Worker 2 waits at A2>3.0 for A3<2.0, which never comes. Move A2>3.0 back or A3<2.0 "
        "forward.",
    ]
    assert "A0>1.2*" in told[5]
