"""What every worker tells is heard by all, round after round."""

from math import inf, nan, pi
from struct import Struct

import pytest

from gpipe.execution.exchange import FLOATS, WHOLE, Exchange
from gpipe.execution.pipe import Pipe
from tests.distributed.four_ranks import four_ranks, mesh_of

pytestmark = pytest.mark.distributed

NUM_WORKERS = 4
NUM_ROUNDS = 100
NUMBERS = {WHOLE: (0, -1, 2**63 - 1, -(2**63)), FLOATS: (pi, nan, inf, -inf, 5e-324, -0.0)}
HOSTS = {WHOLE: 2, FLOATS: 0}


def heard(worker: int, overlap: bool) -> list[list[list[str]]]:
    """What this worker hears in all rounds, of one kind after the other."""
    pipe = Pipe(mesh_of(pipe=NUM_WORKERS))
    try:
        exchanges = {
            kind: Exchange(pipe, host, kind, number)
            for number, (kind, host) in enumerate(HOSTS.items())
        }
        found = []
        # Nobody waits for anybody else between two rounds: whoever is ahead tells the next one.
        for number in range(NUM_ROUNDS):
            if overlap:
                for kind, exchange in exchanges.items():
                    exchange.tell(told(worker, number, kind))
            for kind, exchange in exchanges.items():
                rows = exchange.hear() if overlap else exchange.round(told(worker, number, kind))
                found.append([list(map(repr, row)) for row in rows])
        return found
    finally:
        pipe.close()


def told(worker: int, number: int, kind: Struct) -> list[float]:
    """Not always as many."""
    line: list[float] = [*NUMBERS[kind], worker, *[number] * (number % 2)]
    return line if kind is WHOLE else list(map(float, line))


@pytest.mark.parametrize("overlap", [False, True])
def test_all_hear_the_same_to_the_last_bit_in_every_round(overlap, request):
    expected = [
        [list(map(repr, told(worker, number, kind))) for worker in range(NUM_WORKERS)]
        for number in range(NUM_ROUNDS)
        for kind in HOSTS
    ]
    for found in four_ranks(request).call(heard, overlap):
        assert found == expected
