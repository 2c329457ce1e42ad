"""Every order that the check lets pass also runs, and gives the right gradients."""

from collections.abc import Iterator
from itertools import combinations

import pytest
import torch
from torch import nn

from gpipe import GPipe
from gpipe.errors import ScheduleError
from gpipe.schedule import Schedule, add_recompute, check, resolve
from tests.members import mlp, take_gradients

NUM_STAGES, NUM_MICROBATCHES = 3, 4


def swapped(schedule: Schedule) -> Iterator[Schedule]:
    """All schedules with two actions of a row in each other's place."""
    for worker, row in enumerate(schedule.rows):
        for first, second in combinations(range(len(row)), 2):
            rows = [list(each) for each in schedule.rows]
            rows[worker][first], rows[worker][second] = row[second], row[first]
            yield Schedule(rows, schedule.num_stages, schedule.num_microbatches)


def is_accepted(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", ["fill_drain", "1f1b"])
def test_no_accepted_mutation_hangs_the_executor(name, checkpoint):
    module = mlp().double()
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    nn.MSELoss()(module(x), y).backward()
    plain = take_gradients(module)
    original = add_recompute(resolve(name, NUM_STAGES, NUM_MICROBATCHES), checkpoint)
    mutants = list(swapped(original))
    accepted = [mutant for mutant in mutants if is_accepted(mutant)]
    assert 0 < len(accepted) < len(mutants)
    for mutant in accepted:
        model = GPipe(module, NUM_STAGES, NUM_MICROBATCHES, schedule=mutant, checkpoint="never")
        result = model.step(x, y, nn.MSELoss())
        assert result.timeline.rows == mutant.rows  # law 12: done as it was written
        torch.testing.assert_close(take_gradients(model), plain, rtol=1e-12, atol=1e-15)
