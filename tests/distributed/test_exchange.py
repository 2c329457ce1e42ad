"""What every worker tells is heard by all, round after round."""

from math import inf, nan, pi

import pytest
import torch

from gpipe.execution.exchange import Exchange
from gpipe.execution.pipe import Pipe
from tests.distributed.four_ranks import four_ranks, mesh_of

pytestmark = pytest.mark.distributed

NUM_WORKERS = 4
WHOLE = (0, -1, 2**63 - 1, -(2**63))
FLOATS = (pi, nan, inf, -inf, 5e-324, -0.0)


def heard(worker: int) -> list[list[list[str]]]:
    pipe = Pipe(mesh_of(pipe=NUM_WORKERS))
    try:
        exchange = Exchange(pipe)
        # Nobody waits for anybody else between two rounds: whoever is ahead tells the next one.
        return [
            [[repr(each) for each in row] for row in exchange.round(*told(worker, number))]
            for number in range(100)
        ]
    finally:
        pipe.close()


def told(worker: int, number: int) -> tuple[list[float], torch.dtype]:
    """Of either kind in turn, and not always as many."""
    if number % 2:
        return [*FLOATS, number + worker / 8], torch.float64
    return [*WHOLE, number, worker], torch.int64


def test_all_hear_the_same_to_the_last_bit_in_every_round(request):
    expected = [
        [[repr(each) for each in told(worker, number)[0]] for worker in range(NUM_WORKERS)]
        for number in range(100)
    ]
    for found in four_ranks(request).call(heard):
        assert found == expected
