"""Two replicas of two workers compute what one process does on the rows of both."""

from itertools import product

import pytest
import torch

from tests.distributed.four_ranks import four_ranks
from tests.distributed.replica_calls import (
    LOSSES,
    Case,
    drawn,
    drawn_alone,
    in_one_process,
    in_order,
    joined,
    norms_alone,
    on_replicas,
    rows,
    with_norms,
)
from tests.distributed.team import Team
from tests.members import intra_op_threads, relative_difference

pytestmark = pytest.mark.distributed

LIMITS = {torch.float32: 1e-6, torch.float64: 1e-12}
SCHEDULES = [
    ("fill_drain", 2),
    ("1f1b", 2),
    ("interleaved_1f1b", 4),
    ("looped_breadth_first", 4),
]
CASES = [
    *(
        Case(loss, sizes=(7, 3), all_reduce=all_reduce, bucket_bytes=200, dtype=dtype)
        for loss, all_reduce, dtype in product(LOSSES, ("backend", "ring"), LIMITS)
    ),
    *(
        Case("ignored targets", sizes, schedule, stages)
        for sizes, (schedule, stages) in product([(5, 5), (9, 1)], SCHEDULES)
    ),
    *(
        Case("mean", (3, 7), schedule, stages, all_reduce, 1, "tied")
        for (schedule, stages), all_reduce in zip(SCHEDULES, ["backend", "ring"] * 2, strict=True)
    ),
]


@pytest.fixture(autouse=True)
def one_thread():
    with intra_op_threads(1):
        yield


@pytest.fixture
def team(request) -> Team:
    return four_ranks(request)


def assert_close(mine, other, limit):
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert relative_difference(tensor, other[name]) <= limit, name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replicas_train_like_one_process(team, case):
    every = team.call(on_replicas, case)
    expected, limit = in_one_process(case), LIMITS[case.dtype]
    for replica in (every[:2], every[2:]):
        mine = joined(replica)
        assert mine.losses == pytest.approx(expected.losses, rel=limit)
        assert_close(mine.gradients, expected.gradients, limit)
        assert_close(mine.state, expected.state, limit)
    for one, other in zip(every[:2], every[2:], strict=True):
        assert_close(one.state, other.state, 0.0)


def test_without_a_sum_each_replica_keeps_its_share(team):
    case = Case("weighted", (7, 3), all_reduce="none", num_steps=1)
    every = team.call(on_replicas, case)
    one, other = joined(every[:2]), joined(every[2:])
    expected = in_one_process(case)
    assert one.losses == other.losses == pytest.approx(expected.losses, rel=1e-12)
    total = {name: each + other.gradients[name] for name, each in one.gradients.items()}
    assert_close(total, expected.gradients, 1e-12)


def test_masks_differ_between_replicas_and_the_first_has_those_of_one_process(team):
    _, first, none, second = team.call(drawn)
    assert none == [None, None]
    for mine, alone, others in zip(first, drawn_alone(), second, strict=True):
        assert torch.equal(mine, alone)
        assert not torch.equal(mine, others)


@pytest.mark.parametrize("sizes", [(5, 5), (7, 3)])
def test_deferred_statistics_are_of_the_replica_or_of_all(team, sizes):
    x = rows(Case())[0]
    of_all, _, of_all_too, _ = team.call(with_norms, "replicas", sizes)
    assert_close(of_all, norms_alone(x), 1e-12)
    assert_close(of_all, of_all_too, 0.0)
    own = team.call(with_norms, True, sizes)
    for mine, part in zip(own[::2], x.split(list(sizes)), strict=True):
        assert_close(mine, norms_alone(part), 1e-12)


@pytest.mark.parametrize(("schedule", "num_stages"), SCHEDULES)
def test_sums_begin_before_the_drain_has_ended(team, schedule, num_stages):
    for worker, events in enumerate(team.call(in_order, schedule, num_stages)):
        of_worker = list(range(worker % 2, num_stages, 2))
        assert [events.count(f"backward {stage}") for stage in of_worker] == [4] * len(of_worker)
        before = events[: events.index("sum")]
        # What is done first is summed while the other stage of the worker still goes backward.
        assert min(before.count(f"backward {stage}") for stage in of_worker) < 4 or num_stages == 2
