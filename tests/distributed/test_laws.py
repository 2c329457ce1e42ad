"""The exactness laws with a process for each worker."""

from collections.abc import Callable, Iterator
from itertools import product

import pytest

from tests.distributed.law_cases import BATCHES, LAYERS, LOSSES, SKIPS, TIES
from tests.distributed.law_crossings import ENDS, VALUES
from tests.distributed.laws import Way, assert_as_in_threads, assert_as_plain
from tests.distributed.team import Team
from tests.members import CHECKPOINT_MODES, intra_op_threads

pytestmark = pytest.mark.distributed

SHARES = [
    ("fill_drain", 2, 2),
    ("1f1b", 2, 2),
    ("fill_drain", 4, 4),
    ("1f1b", 4, 4),
    ("interleaved_1f1b", 2, 4),
    ("looped_breadth_first", 2, 4),
]
WAYS = [Way(*share, mode) for share, mode in product(SHARES, CHECKPOINT_MODES)]
SOME_WAYS = [
    Way("1f1b", 4, 4, "except_last"),
    Way("interleaved_1f1b", 2, 4, "always"),
    # The rest takes half a minute more: -m slow.
    pytest.param(Way("looped_breadth_first", 2, 4, "never"), marks=pytest.mark.slow),
    pytest.param(Way("fill_drain", 4, 4, "always"), marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with intra_op_threads(1):
        yield


@pytest.fixture(scope="module")
def team_of() -> Iterator[Callable[[int], Team]]:
    teams = {num_ranks: Team(num_ranks) for num_ranks in (2, 4)}
    yield teams.__getitem__
    for team in teams.values():
        team.close()


def law(cases, ways):
    """Parametrizes a test with the names of the cases and the ways."""
    ways = pytest.mark.parametrize("way", ways, ids=str)
    names = pytest.mark.parametrize("name", cases)
    return lambda test: ways(names(test))


@law(["batch norm", "deferred batch norm"], WAYS)
def test_three_steps_have_the_bits_of_threads(team_of, name, way):
    assert_as_in_threads(team_of(way.num_workers), name, way)


@law(["mean"], WAYS)
def test_three_steps_are_those_of_the_plain_model(team_of, name, way):
    assert_as_plain(assert_as_in_threads(team_of(way.num_workers), name, way), name)


@law(LOSSES, SOME_WAYS[:2])
def test_losses(team_of, name, way):
    assert_as_plain(assert_as_in_threads(team_of(way.num_workers), name, way), name)


@law(SKIPS | TIES, SOME_WAYS)
def test_skips_and_ties(team_of, name, way):
    assert_as_plain(assert_as_in_threads(team_of(way.num_workers), name, way), name)


@law(BATCHES, SOME_WAYS)
def test_batches_of_any_size(team_of, name, way):
    assert_as_plain(assert_as_in_threads(team_of(way.num_workers), name, way), name)


# Some draw, some change buffers with each micro-batch: a plain model is no measure for them.
@law(LAYERS, SOME_WAYS)
def test_layers_of_any_kind(team_of, name, way):
    assert_as_in_threads(team_of(way.num_workers), name, way)


@law(ENDS, SOME_WAYS[:1])
def test_whatever_goes_in_and_comes_out(team_of, name, way):
    assert_as_plain(assert_as_in_threads(team_of(way.num_workers), name, way), name)


@law(VALUES, SOME_WAYS[:2])
def test_whatever_crosses_a_boundary(team_of, name, way):
    assert_as_plain(assert_as_in_threads(team_of(way.num_workers), name, way), name)
