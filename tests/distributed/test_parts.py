"""Of a model that was built on meta each rank makes its own part, with values no cut changes."""

import pytest
import torch

from tests.distributed.four_ranks import four_ranks
from tests.distributed.part_calls import (
    MESHES,
    in_threads,
    part,
    part_bytes,
    tied_part,
    total_bytes,
)
from tests.distributed.team import Team

pytestmark = pytest.mark.distributed

over_meshes = pytest.mark.parametrize("mesh", MESHES)


@pytest.fixture
def team(request) -> Team:
    return four_ranks(request)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_threads_make_the_same_first_values(num_stages):
    assert_same(in_threads(num_stages), in_threads(1))


@over_meshes
def test_ranks_make_the_first_values_of_one_process(team, mesh):
    every, expected = team.call(part, mesh), in_threads(1)
    for mine in every:
        assert_same(mine, {name: expected[name] for name in mine})
        assert mine.keys() < expected.keys()
    assert {name for mine in every for name in mine} == expected.keys()


@over_meshes
def test_ties_survive(team, mesh):
    every = team.call(tied_part, mesh)
    first, last = every[0], every[-1]
    for at_first, at_last in zip(first, last, strict=True):
        assert torch.equal(at_first["0.weight"], at_last["6.logits.weight"])


@over_meshes
def test_a_rank_holds_its_own_part_only(team, mesh):
    every = team.call(part_bytes, mesh)
    num_replicas = MESHES[mesh].get("data", 1)
    assert sum(held for held, _ in every) == total_bytes() * num_replicas
    for held, grown in every:
        assert held > 0
        assert grown <= held + 1024  # a generator's state and the like


def assert_same(mine, expected):
    assert mine.keys() == expected.keys()
    for name, value in mine.items():
        assert torch.equal(value, expected[name]), name
