"""Who sends which chunk when, in a ring of devices."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Exchange", "all_gather", "order_by_host", "scatter_reduce"]


class Exchange(NamedTuple):
    """The chunk that goes to the right in one step, and the one that comes from the left."""

    sent: int
    received: int


def scatter_reduce(place: int, step: int, num_devices: int) -> Exchange:
    """What the device at a place exchanges in a step of the first phase; it adds what comes.

    After its `num_devices - 1` steps the device at place n has all of chunk n + 1.

    Args:
        place: In the ring, from 0; the right neighbour has the next one.
        step: From 0.
        num_devices: As many as there are chunks.
    """
    return Exchange((place - step) % num_devices, (place - step - 1) % num_devices)


def all_gather(place: int, step: int, num_devices: int) -> Exchange:
    """The same for the second phase, in which what comes takes the place of what was there."""
    return Exchange((place + 1 - step) % num_devices, (place - step) % num_devices)


def order_by_host(hosts: Sequence[str]) -> list[int]:
    """The order of ranks in a ring in which those on one host are neighbours.

    A ring of one host after the other crosses each border between hosts once in each direction.

    Args:
        hosts: The name of each rank's host, by rank.

    Returns:
        Every rank once. Hosts come in the order of their first ranks, and ranks ascend on each.

    Raises:
        TypeError: `hosts` is a single string.
    """
    if isinstance(hosts, str):
        raise TypeError(f"`hosts` is {hosts!r}. Pass a list with the name of each rank's host.")
    firsts = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    return sorted(range(len(hosts)), key=lambda rank: firsts[hosts[rank]])
