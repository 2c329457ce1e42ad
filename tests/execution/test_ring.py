"""Who sends which chunk when: the tables of the paper's notes, and the laws for every ring."""

from collections import Counter
from itertools import product

import pytest

from gpipe.execution import order_by_host
from gpipe.execution.ring import all_gather, scatter_reduce

SIZES = range(1, 13)


def test_the_first_step_of_scatter_reduce_is_the_papers():
    table = [tuple(scatter_reduce(place, 0, 5)) for place in range(5)]
    assert table == [(0, 4), (1, 0), (2, 1), (3, 2), (4, 3)]


def test_the_first_step_of_all_gather_is_the_papers():
    table = [tuple(all_gather(place, 0, 5)) for place in range(5)]
    assert table == [(1, 0), (2, 1), (3, 2), (4, 3), (0, 4)]


@pytest.mark.parametrize("phase", [scatter_reduce, all_gather])
@pytest.mark.parametrize("num_devices", SIZES)
def test_each_device_receives_what_its_left_neighbour_sends(phase, num_devices):
    for place, step in product(range(num_devices), range(num_devices - 1)):
        left = phase((place - 1) % num_devices, step, num_devices)
        assert phase(place, step, num_devices).received == left.sent


@pytest.mark.parametrize("phase", [scatter_reduce, all_gather])
@pytest.mark.parametrize("num_devices", SIZES)
def test_each_step_sends_what_the_step_before_has_received(phase, num_devices):
    for place, step in product(range(num_devices), range(1, num_devices - 1)):
        before = phase(place, step - 1, num_devices)
        assert phase(place, step, num_devices).sent == before.received


@pytest.mark.parametrize("num_devices", SIZES)
def test_every_chunk_is_summed_once_over_all_devices_and_reaches_all(num_devices):
    devices = range(num_devices)
    # What each chunk of each device is the sum of.
    held = {(place, chunk): Counter([place]) for place in devices for chunk in devices}
    for step in range(num_devices - 1):
        sent = exchanged(scatter_reduce, step, held, num_devices)
        for key, value in sent.items():
            held[key] = held[key] + value
    everyone = Counter(devices)
    for place in devices:
        complete = [chunk for chunk in devices if held[place, chunk] == everyone]
        assert complete == [(place + 1) % num_devices]
    for step in range(num_devices - 1):
        held |= exchanged(all_gather, step, held, num_devices)
    assert all(value == everyone for value in held.values())


def exchanged(phase, step, held, num_devices):
    """What arrives in a step: device and chunk, with what the chunk is the sum of."""
    arrived = {}
    for place in range(num_devices):
        chunk = phase(place, step, num_devices).sent
        right = (place + 1) % num_devices
        assert phase(right, step, num_devices).received == chunk
        arrived[right, chunk] = held[place, chunk]
    return arrived


@pytest.mark.parametrize("num_devices", SIZES)
def test_each_device_receives_every_chunk_once_a_phase_except_one(num_devices):
    for phase, place in product((scatter_reduce, all_gather), range(num_devices)):
        steps = [phase(place, step, num_devices) for step in range(num_devices - 1)]
        assert len({step.received for step in steps}) == num_devices - 1
        assert len({step.sent for step in steps}) == num_devices - 1


@pytest.mark.parametrize(
    ("hosts", "order"),
    [
        ([], []),
        (["a"], [0]),
        (["a", "a", "b", "b"], [0, 1, 2, 3]),
        (["a", "b", "a", "b"], [0, 2, 1, 3]),
        (["b", "a", "c", "a", "b"], [0, 4, 1, 3, 2]),
    ],
)
def test_ranks_on_one_host_are_neighbours(hosts, order):
    assert order_by_host(hosts) == order


def test_the_ring_changes_host_as_rarely_as_it_can():
    for hosts in product("abc", repeat=5):
        order = order_by_host(hosts)
        assert sorted(order) == list(range(len(hosts)))
        ring = [hosts[rank] for rank in order]
        num_changes = sum(ring[place] != ring[place - 1] for place in range(len(ring)))
        num_hosts = len(set(hosts))
        assert num_changes == (num_hosts if num_hosts > 1 else 0)


def test_one_string_is_no_list_of_hosts():
    with pytest.raises(TypeError, match=r"`hosts` is 'node1'\. Pass a list"):
        order_by_host("node1")
