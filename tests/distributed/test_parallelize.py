"""Stages whose layers are spread over further dimensions of the mesh train as the plain model."""

from itertools import product

import pytest

from tests.distributed.four_ranks import four_ranks
from tests.distributed.parallel_calls import KINDS, WRONG_HOOKS, as_it_is, refused, spread
from tests.distributed.team import Team
from tests.members import intra_op_threads, relative_difference

pytestmark = pytest.mark.distributed

LIMIT = 1e-12
WAYS = [("1f1b", "never"), ("fill_drain", "always"), ("interleaved_1f1b", "except_last")]


@pytest.fixture(autouse=True)
def one_thread():
    with intra_op_threads(1):
        yield


@pytest.fixture
def team(request) -> Team:
    return four_ranks(request)


@pytest.mark.parametrize(("kind", "way"), list(product(KINDS, WAYS)), ids=str)
def test_a_spread_model_trains_like_the_plain_one(team, kind, way):
    every = team.call(spread, kind, *way, 5)
    assert_trained_alike(every)
    if kind == "fully_shard":  # each of four has a quarter, but for what cannot be halved evenly
        total = sum(each.numel() for each in as_it_is().state.values())
        assert sum(each.local_elements for each in every) == total


def test_shards_of_replicas_with_uneven_rows(team):
    assert_trained_alike(team.call(spread, "fully_shard", *WAYS[0], 6))


# With 7 and 3 rows there are 4 and 3 micro-batches, and FSDP gathers weights once for each: all
# ranks would wait for ever.
@pytest.mark.slow
def test_shards_of_replicas_with_other_numbers_of_micro_batches_are_refused(team):
    with pytest.raises(ValueError, match="micro-batches"):
        team.call(spread, "fully_shard", *WAYS[0], 7, timeout_s=30)


def assert_trained_alike(every):
    expected = as_it_is()
    for mine in every:
        assert mine.losses == pytest.approx(expected.losses, rel=LIMIT)
        assert mine.norms == pytest.approx(expected.norms, rel=LIMIT)
        for found, wanted in (mine.gradients, expected.gradients), (mine.state, expected.state):
            for name, tensor in found.items():
                assert relative_difference(tensor, wanted[name]) <= LIMIT, name
    assert {name for each in every for name in each.state} == set(expected.state)


@pytest.mark.parametrize("name", WRONG_HOOKS)
def test_wrong_hooks_are_refused(team, name):
    for said in team.call(refused, name):
        assert WRONG_HOOKS[name][2] in said
