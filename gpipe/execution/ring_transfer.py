"""Moves chunks around a ring, in several messages at once."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

from torch import Tensor
from torch import distributed as dist

from gpipe.execution.ring import all_gather, scatter_reduce

__all__ = ["Ring", "reduce_in_ring"]

# Many small messages cost more than they hide: each wakes threads on both sides.
_LARGEST_MESSAGE_BYTES = 2 * 2**20
_NUM_IN_FLIGHT = 4

# On gloo no other message between the same ranks can be taken for one of these.
_TAG = 0x52494E47


class Ring(NamedTuple):
    """A ring of ranks as this process sees it.

    Attributes:
        group: All of them.
        order: Their ranks in the group, from left to right.
        place: Where this process is.
    """

    group: dist.ProcessGroup
    order: Sequence[int]
    place: int

    @property
    def right(self) -> int:
        """The rank that is sent to."""
        return self.order[(self.place + 1) % len(self.order)]

    @property
    def left(self) -> int:
        """The rank that is received from."""
        return self.order[self.place - 1]


class _Message(NamedTuple):
    """What goes to the right and what comes from the left at one time, parts of two chunks."""

    sent: Tensor
    received: Tensor
    is_added: bool
    """Or takes the place of what was there."""


class _Flight(NamedTuple):
    """A message on its way."""

    message: _Message
    landing: Tensor
    """Where it arrives: in a buffer if it is to be added, else where it belongs."""
    arrival: dist.Work | None
    """None where nothing comes."""
    departure: dist.Work | None
    """None where nothing leaves, or where the arrival stands for both."""


def reduce_in_ring(values: Tensor, ring: Ring) -> None:
    """Sum one-dimensional, contiguous tensors over a ring of at least two, in place.

    At most w messages are in flight, w being at most the number of messages of a step: message
    i + w starts when message i has arrived. So what is sent is complete, since it came a step
    before. What leaves in the first phase is overwritten in the second, in the same order; until
    then nobody waits for it to have left.
    """
    longest = -(-values.numel() // len(ring.order))
    num_pieces = max(1, -(-longest * values.element_size() // _LARGEST_MESSAGE_BYTES))
    num_in_flight = min(num_pieces, _NUM_IN_FLIGHT)
    buffers = _buffers(values, -(-longest // num_pieces), num_in_flight)
    start = _start_each if _posts_at_once(values) else _start_pair
    arriving: deque[_Flight] = deque()
    departing: deque[_Flight] = deque()
    for message in _messages(values, ring, num_pieces):
        if len(arriving) == num_in_flight:
            _land(arriving.popleft())
        if not message.is_added:
            _wait(departing.popleft().departure)
        flight = start(message, buffers, ring)
        arriving.append(flight)
        departing.append(flight)
    for flight in arriving:
        _land(flight)
    for flight in departing:
        _wait(flight.departure)


def _buffers(like: Tensor, length: int, most: int) -> Iterator[Tensor]:
    """In turn so many, each of which is made when it is needed first."""
    made = []
    for _ in range(most):
        made.append(like.new_empty(length))
        yield made[-1]
    yield from cycle(made)


def _messages(values: Tensor, ring: Ring, num_pieces: int) -> Iterator[_Message]:
    """All of them in order; each chunk is cut into so many pieces."""
    num_devices = len(ring.order)
    pieces = [_cut(chunk, num_pieces) for chunk in _cut(values, num_devices)]
    for phase in scatter_reduce, all_gather:
        for step in range(num_devices - 1):
            sent, received = phase(ring.place, step, num_devices)
            for pair in zip(pieces[sent], pieces[received], strict=True):
                yield _Message(*pair, is_added=phase is scatter_reduce)


def _cut(values: Tensor, num_parts: int) -> Sequence[Tensor]:
    return values.tensor_split(num_parts) if num_parts > 1 else (values,)


def _posts_at_once(tensor: Tensor) -> bool:
    """Whether posting never waits for the peer, as on gloo."""
    return tensor.is_cpu


# Both sides know which chunks are empty, and do without their messages. The send comes first: of
# two ranks on gloo, the one that writes would else hold a lock that its own reader spins on.


def _start_each(message: _Message, buffers: Iterator[Tensor], ring: Ring) -> _Flight:
    """A tenth of a millisecond less than the pair takes: for small sums that is much."""
    sent = message.sent
    departure = ring.group.send([sent], ring.right, _TAG) if sent.numel() else None
    landing = _landing(message, buffers)  # new memory is made ready while the message leaves
    arrival = ring.group.recv([landing], ring.left, _TAG) if landing.numel() else None
    return _Flight(message, landing, arrival, departure)


def _start_pair(message: _Message, buffers: Iterator[Tensor], ring: Ring) -> _Flight:
    """Together, since either may block until its peer has posted."""
    landing = _landing(message, buffers)
    posts = [(dist.isend, message.sent, ring.right), (dist.irecv, landing, ring.left)]
    operations = [
        dist.P2POp(operation, tensor, group=ring.group, tag=_TAG, group_peer=peer)
        for operation, tensor, peer in posts
        if tensor.numel()
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    arrival = works[-1] if landing.numel() else None
    first = works[0] if works else None  # a backend may give one work for both
    return _Flight(message, landing, arrival, None if first is arrival else first)


def _landing(message: _Message, buffers: Iterator[Tensor]) -> Tensor:
    if not message.is_added:
        return message.received
    return next(buffers)[: message.received.numel()]


def _land(flight: _Flight) -> None:
    _wait(flight.arrival)
    if flight.message.is_added:
        flight.message.received.add_(flight.landing)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
