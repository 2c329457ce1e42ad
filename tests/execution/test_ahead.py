"""Receives that are posted together."""

from functools import partial
from itertools import chain, product

import pytest

from gpipe.execution.ahead import Ahead, posted_together
from gpipe.schedule import SCHEDULE_NAMES, Kind, Transfer, add_transfers, resolve

NEEDERS = {Kind.RECEIVE_ACTIVATION: Kind.FORWARD, Kind.RECEIVE_GRADIENT: Kind.BACKWARD}
SIZES = [(2, 2, 1), (2, 2, 8), (2, 4, 4), (4, 4, 12), (4, 8, 8)]  # workers, stages, micro-batches


def ways(schedule):
    """Each row with each kind, stage and peer of its receives."""
    found = {
        (row, each[0], each[1], each[3])
        for row in schedule.rows
        for each in row
        if each[0] in NEEDERS
    }
    return sorted(found)


every_schedule = pytest.mark.parametrize(("name", "sizes"), [*product(SCHEDULE_NAMES, SIZES)])


def scheduled(name, sizes, skips=()):
    num_workers, num_stages, num_microbatches = sizes
    if name in ("fill_drain", "1f1b"):
        num_stages = num_workers
    schedule = resolve(name, num_stages, num_microbatches, num_workers)
    return add_transfers(schedule, [(a, b % num_stages) for a, b in skips])


@every_schedule
def test_each_is_posted_once_in_order_in_time_and_in_the_memory_of_the_peak(name, sizes):
    num_microbatches = sizes[-1]
    for row, kind, stage, peer in ways(scheduled(name, sizes)):
        together = posted_together(row, kind, stage, peer)
        asked = [each[2] for each in row if each[:2] + each[3:] == (kind, stage, peer)]
        own = [each for each in row if each[1] == stage]
        peak = max(held_along(own))
        if peak < num_microbatches:
            assert not together, "one by one"
            continue
        assert list(chain.from_iterable(together.values())) == asked
        posted = []
        for action, held in zip(own, held_along(own), strict=True):
            if action[0] is NEEDERS[kind]:
                posted.remove(action[2])  # it was posted by then
            elif action[:2] + action[3:] == (kind, stage, peer):
                is_asked_only = together[action[2]] == [action[2]]
                posted += together[action[2]]
                assert len(posted) + held <= peak + 1 or is_asked_only


def held_along(actions):
    """How many micro-batches the stage holds behind each of its actions."""
    held, found = 0, []
    for each in actions:
        held += (each[0] is Kind.FORWARD) - (each[0] is Kind.BACKWARD)
        found.append(held)
    return found


def test_fill_drain_posts_all_activations_at_once_and_gradients_as_memory_is_freed():
    schedule = add_transfers(resolve("fill_drain", 2, 16, 2))
    row = schedule.rows[1]
    together = posted_together(row, Kind.RECEIVE_ACTIVATION, 1, 0)
    assert [len(each) for each in together.values()] == [16] + [0] * 15
    together = posted_together(schedule.rows[0], Kind.RECEIVE_GRADIENT, 0, 1)
    assert [len(each) for each in together.values() if each] == [1, 2, 4, 8, 1]


class Posting:
    """Runs through a row, and keeps what is posted and has not been waited for."""

    def __init__(self, row, kind):
        self.kind = kind
        self.asked = [each for each in row if each[0] is kind]
        self.posted = []
        self.outstanding = set()
        self.num_early = 0  # before their turn
        self.turns = set()
        self.ahead = Ahead(row, kind)
        self.at_turn = {
            way: self.ahead.join(*way, partial(self.post, *way))
            for way in dict.fromkeys((each.stage, each.peer) for each in self.asked)
        }
        for action in row:
            self.act(action)

    def post(self, stage, peer, microbatch):
        receive = Transfer(self.kind, stage, microbatch, peer)
        self.posted.append(receive)
        self.outstanding.add(receive)
        self.num_early += receive not in self.turns

    def act(self, action):
        if action[0] is self.kind:
            self.turns.add(action)
            self.at_turn[action.stage, action.peer](action.microbatch)
        elif action[0] is NEEDERS[self.kind]:
            for receive in [each for each in self.outstanding if each[1:3] == action[1:3]]:
                self.outstanding.remove(receive)
                self.ahead.landed()
        assert len(self.outstanding - self.turns) <= 1


@every_schedule
@pytest.mark.parametrize("kind", NEEDERS)
@pytest.mark.parametrize("skips", [(), [(0, -1)]], ids=["no skip", "far skip"])
def test_one_by_one_is_in_order_in_time_and_at_most_one_before_its_turn(name, sizes, kind, skips):
    for row in scheduled(name, sizes, skips).rows:
        posting = Posting(row, kind)
        assert posting.posted == posting.asked
        assert not posting.outstanding, "each has landed before it was needed"


@pytest.mark.parametrize("skips", [(), [(0, -1)]], ids=["no skip", "far skip"])
def test_under_1f1b_all_but_the_first_are_posted_when_another_has_landed(skips):
    num_workers, num_microbatches = 4, 12
    schedule = scheduled("1f1b", (num_workers, num_workers, num_microbatches), skips)
    for worker, row in enumerate(schedule.rows):
        if worker > 0:
            assert Posting(row, Kind.RECEIVE_ACTIVATION).num_early >= num_microbatches - num_workers
        if worker < num_workers - 1:
            assert Posting(row, Kind.RECEIVE_GRADIENT).num_early >= num_microbatches - num_workers
