"""Every single mutation of K = 3, M = 4: refused, or proven to be another valid order."""

from collections import Counter
from itertools import combinations, product

import pytest

from gpipe.errors import ScheduleError
from gpipe.schedule import (
    Kind,
    Schedule,
    add_recompute,
    add_transfers,
    check,
    predecessors,
    resolve,
)
from tests.schedule.blocking import runs_to_the_end
from tests.schedule.members import MODES, NAMES

R = Kind.RECOMPUTE
MEMBERS = [*product(NAMES, MODES), ("looped", "never"), ("skip", "always")]
all_members = pytest.mark.parametrize(("name", "mode"), MEMBERS)


def schedule_of(name, mode):
    """With transfers; "looped" has two stages per worker, "skip" a skip over a stage."""
    if name == "looped":
        return add_transfers(add_recompute(resolve("interleaved_1f1b", 4, 4, 2), mode))
    skips = [(0, 2)] if name == "skip" else []
    bare = resolve("1f1b" if name == "skip" else name, 3, 4)
    return add_transfers(add_recompute(bare, mode), skips)


def changed(schedule, change):
    rows = [list(row) for row in schedule.rows]
    change(rows)
    return Schedule(rows, schedule.num_stages, schedule.num_microbatches)


def places(schedule):
    return [(worker, i) for worker, row in enumerate(schedule.rows) for i in range(len(row))]


def is_accepted(schedule):
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True


def is_equivalent(mutant, original):
    """The same actions on the same workers, in another order that satisfies the same needs.

    A proof: all of them run in the strictest run, in which nothing runs before what it needs; what
    each needs is the same as before, a dropped recompute apart; and whatever two workers exchange
    stands in the same order in both rows.
    """
    kept = {action for row in mutant.rows for action in row}
    for row, others in zip(original.rows, mutant.rows, strict=True):
        if Counter(others) != Counter(action for action in row if action in kept):
            return False
    lost = {action for row in original.rows for action in row} - kept
    if any(action.kind != R for action in lost):
        return False
    if not lost and any(
        predecessors(action, mutant) != predecessors(action, original) for action in kept
    ):
        return False
    return runs_to_the_end(mutant) and in_one_order(mutant)


def in_one_order(schedule):
    exchanged = {}
    for worker, row in enumerate(schedule.rows):
        for action in row:
            if action.peer is not None:
                way = frozenset((action, action.partner))
                pair = worker, schedule.worker_of(action.peer)
                exchanged.setdefault(pair, []).append(way)
    return all(exchanged[pair] == exchanged[pair[::-1]] for pair in exchanged)


def require_verdict(mutant, original):
    """The check says what the proof says, and what it lets pass never hangs."""
    accepted = is_accepted(mutant)
    assert accepted == is_equivalent(mutant, original)
    assert runs_to_the_end(mutant) or not accepted
    return accepted


@all_members
def test_the_original_is_accepted(name, mode):
    schedule = schedule_of(name, mode)
    assert require_verdict(schedule, schedule)


@all_members
def test_dropped(name, mode):
    schedule = schedule_of(name, mode)
    for worker, place in places(schedule):
        mutant = changed(schedule, lambda rows, w=worker, p=place: rows[w].pop(p))
        dropped = schedule.rows[worker][place]
        assert require_verdict(mutant, schedule) == (dropped.kind == R)


@all_members
def test_doubled(name, mode):
    schedule = schedule_of(name, mode)
    for worker, place in places(schedule):
        twin = schedule.rows[worker][place]
        for target in (0, place, len(schedule.rows[worker])):
            mutant = changed(
                schedule, lambda rows, w=worker, t=target, a=twin: rows[w].insert(t, a)
            )
            assert not require_verdict(mutant, schedule)


@all_members
def test_swapped(name, mode):
    schedule = schedule_of(name, mode)
    verdicts = Counter()
    for worker, row in enumerate(schedule.rows):
        for place, other in combinations(range(len(row)), 2):

            def swap(rows, w=worker, p=place, o=other):
                rows[w][p], rows[w][o] = rows[w][o], rows[w][p]

            verdicts[require_verdict(changed(schedule, swap), schedule)] += 1
    assert verdicts[False] > verdicts[True]


@pytest.mark.parametrize(("name", "mode"), [("1f1b", "always"), ("looped", "never")])
def test_swapped_between_workers(name, mode):
    schedule = schedule_of(name, mode)
    for (worker, place), (other, there) in combinations(places(schedule), 2):
        if worker == other:
            continue

        def swap(rows, w=worker, p=place, o=other, t=there):
            rows[w][p], rows[o][t] = rows[o][t], rows[w][p]

        assert not is_accepted(changed(schedule, swap))


@all_members
def test_sends_reversed(name, mode):
    """The sends of one row, of all rows, and each transfer the other way round."""
    schedule = schedule_of(name, mode)
    for workers in ({0}, {1}, range(schedule.num_workers)):

        def reverse(rows, workers=workers):
            for worker in workers:
                sends = [i for i, each in enumerate(rows[worker]) if each.kind in ("A>", "G>")]
                actions = [rows[worker][i] for i in reversed(sends)]
                for i, action in zip(sends, actions, strict=True):
                    rows[worker][i] = action

        assert not require_verdict(changed(schedule, reverse), schedule)
    for worker, place in places(schedule):
        action = schedule.rows[worker][place]
        if action.peer is not None:

            def turn(rows, w=worker, p=place, a=action):
                rows[w][p] = a.partner

            assert not is_accepted(changed(schedule, turn))
