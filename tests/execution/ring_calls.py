"""What ranks do in `test_all_reduce`, each part in a function; results go back to the test."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch import distributed as dist

from gpipe.execution import order_by_host, ring_all_reduce, ring_transfer

NUM_RANKS = 5
SCATTERED = (1, 3, 4)
ORDERS = {"mixed": (2, 0, 3, 1), "by host": order_by_host(["a", "b", "a", "b"])}

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
SHAPES = ((), (0,), (1,), (2,), (3,), (4,), (5,), (23,), (3, 4), (2, 0, 3))

Groups = dict[int, Any]


class Case(NamedTuple):
    num_ranks: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def values(self, rank: int) -> Tensor:
        """Small whole numbers: sums of them are exact in every dtype."""
        numbers = torch.arange(torch.Size(self.shape).numel()).view(self.shape)
        values = ((numbers * (rank + 2)) % 7 + rank).to(self.dtype)
        return values * (1 + 2j) if self.dtype.is_complex else values

    def expected(self, ranks: Sequence[int] | None = None) -> Tensor:
        ranks = range(self.num_ranks) if ranks is None else ranks
        each = torch.stack([self.values(rank) for rank in ranks])
        return each.any(0) if self.dtype is torch.bool else each.sum(0, dtype=self.dtype)


KINDS = [Case(number, (7,), dtype) for number in range(1, NUM_RANKS + 1) for dtype in DTYPES]
SIZES = [Case(number, shape) for number in range(1, NUM_RANKS + 1) for shape in SHAPES]
PIECES = [Case(number, (size,)) for number in range(2, NUM_RANKS + 1) for size in (20, 101, 240)]
COUNTED = [Case(number, (240,)) for number in range(1, NUM_RANKS + 1)]


def everything(rank: int) -> dict[str, Any]:
    """Every part in turn, in one set of processes: starting them is what takes long."""
    groups: Groups = {number: dist.new_group(range(number)) for number in range(1, NUM_RANKS)}
    groups[NUM_RANKS] = None
    parts = (
        summed, in_pieces, in_pieces_that_block, counted, rounded, laid_out, in_an_order,
        in_a_scattered_group, amid_other_messages, seen_by_autograd, refused,
    )  # fmt: skip
    return {part.__name__: part(rank, groups) for part in parts}


def summed(rank: int, groups: Groups, cases: Sequence[Case] = (*KINDS, *SIZES)) -> dict:
    """The sums by case, on the ranks of its group."""
    found = {}
    for case in cases:
        if rank < case.num_ranks:
            found[case] = case.values(rank)
            ring_all_reduce(found[case], groups[case.num_ranks])
    return found


def small_messages() -> Any:
    return patch.multiple(ring_transfer, _LARGEST_MESSAGE_BYTES=16, _NUM_IN_FLIGHT=3)


def in_pieces(rank: int, groups: Groups) -> dict:
    with small_messages():
        return summed(rank, groups, PIECES)


class Done:
    """The one work of a batch that is over."""

    def wait(self) -> None:
        pass


def in_pieces_that_block(rank: int, groups: Groups) -> dict:
    """Each message is over before the next one starts, as on a backend without buffers."""
    start = dist.batch_isend_irecv

    def start_and_wait(operations: list) -> list:
        for work in start(operations):
            work.wait()
        return [Done()]

    blocking = patch.object(ring_transfer, "_posts_at_once", lambda _: False)
    with blocking, patch.object(dist, "batch_isend_irecv", start_and_wait):
        return in_pieces(rank, groups)


class Traffic(NamedTuple):
    """Bytes by the rank of the peer in the group."""

    sent: dict[int, int]
    received: dict[int, int]


@contextmanager
def counting() -> Iterator[Traffic]:
    start, traffic = ring_transfer._start_each, Traffic({}, {})

    def start_and_count(message: Any, buffers: Any, ring: Any) -> Any:
        flight = start(message, buffers, ring)
        sent, landing = message.sent, flight.landing
        for by_peer, peer, tensor in (
            (traffic.sent, ring.right, sent),
            (traffic.received, ring.left, landing),
        ):
            by_peer[peer] = by_peer.get(peer, 0) + tensor.nbytes
        missing = flight.departure is None, flight.arrival is None
        assert missing == (not sent.numel(), not landing.numel())
        return flight

    with patch.object(ring_transfer, "_start_each", start_and_count):
        yield traffic


def counted(rank: int, groups: Groups) -> dict[Case, Traffic]:
    found = {}
    for case in (*COUNTED, Case(NUM_RANKS, (2,))):
        with counting() as found[case], small_messages():
            summed(rank, groups, [case])
    return found


def rounded(rank: int, _: Groups) -> dict[torch.dtype, tuple[Tensor, Tensor]]:
    """By dtype: random numbers, and their sum, in which every bit depends on the order."""
    found = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(rank)
        mine = torch.randn(1000, generator=generator, dtype=torch.float64).to(dtype)
        total = mine.clone()
        ring_all_reduce(total)
        found[dtype] = mine, total
    return found


def laid_out(rank: int, _: Groups) -> dict[str, tuple[Tensor, Tensor]]:
    """By layout: the sum, and the tensor that it is a view of; one layout differs by rank."""
    case = Case(NUM_RANKS, (4, 3))
    views = {
        "transposed": lambda: torch.zeros(3, 4).T,
        "every other": lambda: torch.zeros(8, 6)[::2, 1::2],
        "of one rank": lambda: torch.zeros(3, 4).T if rank == 2 else torch.zeros(4, 3),
        "conjugate": lambda: torch.zeros(4, 3, dtype=torch.complex64).conj(),
        "negative": lambda: torch.zeros(4, 3, dtype=torch.complex64).conj().imag,
    }
    found = {}
    for name, view in views.items():
        tensor = view()
        ring_all_reduce(tensor.copy_(case.values(rank)))
        found[name] = tensor.resolve_conj().resolve_neg().clone(), tensor._base
    return found


def in_an_order(rank: int, groups: Groups) -> dict[str, tuple[Tensor, Traffic]]:
    """By order, in a group of four: the sum, and who was talked to."""
    case, found = Case(4, (8,)), {}
    for name, order in ORDERS.items():
        if rank < case.num_ranks:
            total = case.values(rank)
            with counting() as traffic:
                ring_all_reduce(total, groups[4], order=order)
            found[name] = total, traffic
    return found


def in_a_scattered_group(rank: int, _: Groups) -> Tensor | None:
    group = dist.new_group(SCATTERED)
    if rank not in SCATTERED:
        return None
    total = Case(NUM_RANKS, (7,)).values(rank)
    ring_all_reduce(total, group, order=[2, 0, 1])
    return total


def amid_other_messages(rank: int, _: Groups) -> tuple[int, Tensor]:
    """A message of somebody else's to the right neighbour, under way before and after."""
    right, left = (rank + 1) % NUM_RANKS, (rank - 1) % NUM_RANKS
    sent, total = torch.tensor(rank), Case(NUM_RANKS, (7,)).values(rank)
    work = dist.isend(sent, right)
    ring_all_reduce(total)
    received = torch.tensor(-1)
    dist.recv(received, left)
    work.wait()
    return int(received), total


def seen_by_autograd(rank: int, _: Groups) -> tuple[Tensor, bool, int]:
    """A leaf that requires a gradient: its sum, whether it has a graph, its version."""
    parameter = torch.nn.Parameter(Case(NUM_RANKS, (7,)).values(rank))
    before = parameter._version
    ring_all_reduce(parameter)
    return parameter.detach(), parameter.grad_fn is not None, parameter._version - before


def refused(rank: int, groups: Groups) -> dict[str, Exception]:
    """What wrong arguments raise; nothing is sent for them."""
    values = torch.ones(3)
    pair = groups[2]
    calls = {
        "short": lambda: ring_all_reduce(values, order=[0, 1]),
        "double": lambda: ring_all_reduce(values, order=[0, 1, 2, 3, 3]),
        "number": lambda: ring_all_reduce(values, order=3),
    }
    if rank >= 2:
        calls["outside"] = lambda: ring_all_reduce(values, pair)
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            errors[name] = error
    return errors
