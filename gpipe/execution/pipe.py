"""The processes that run one model together, seen from one of them."""

from collections.abc import Iterator, Sequence
from socket import gethostname
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gpipe.execution.peer import Peer
from gpipe.execution.ring import order_by_host
from gpipe.stage.device import HOST, Traffic

__all__ = ["DATA", "PIPE", "Pipe", "gathered", "require_mesh"]

PIPE = "pipe"
DATA = "data"


class Pipe:
    """This process's place among those that run one model, and how it reaches them.

    Activations and gradients have groups of their own, since a backend may carry what goes over
    one group in one order only; what the host has to know goes over a third one, on gloo.

    Args:
        mesh: One that `require_mesh` lets pass: with a dimension "pipe", along which the workers of
            one replica are, and perhaps "data", along which the replicas are. Others are for what a
            stage does inside.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.worker = mesh.get_local_rank(PIPE)
        self.num_workers = mesh.size(_dim(mesh, PIPE))
        has_replicas = DATA in _names(mesh)
        self.replica = mesh.get_local_rank(DATA) if has_replicas else 0
        self.num_replicas = mesh.size(_dim(mesh, DATA)) if has_replicas else 1
        backend = dist.get_backend(mesh.get_group(PIPE))
        self.control = _group_along(mesh, PIPE, "gloo")
        self.groups = {
            traffic: _group_along(mesh, PIPE, backend)
            for traffic in (Traffic.ACTIVATIONS, Traffic.GRADIENTS)
        }
        self.replicas, self.replicas_control = None, None
        if self.num_replicas > 1:
            self.replicas = _group_along(mesh, DATA, backend)
            self.replicas_control = _group_along(mesh, DATA, "gloo")

    def peer(self, worker: int, traffic: Traffic = Traffic.ACTIVATIONS) -> Peer:
        """Another worker, for this kind of traffic."""
        return Peer(worker, self.groups[traffic], self.control)

    def replicas_by_host(self) -> list[int]:
        """The replicas in an order in which those of one host are neighbours; all call it."""
        hosts = [""] * self.num_replicas
        dist.all_gather_object(hosts, gethostname(), self.replicas_control)
        return order_by_host(hosts)

    def close(self) -> None:
        """Give the groups back."""
        for group in (self.control, *self.groups.values(), self.replicas, self.replicas_control):
            if group is not None:
                dist.destroy_process_group(group)


def gathered(numbers: Sequence[float], group: dist.ProcessGroup) -> list[list[float]]:
    """The numbers of every rank of a gloo group, by rank; exact, also if they are not finite."""
    mine = torch.tensor(numbers, dtype=torch.float64, device=HOST)
    # all_gather sends them around a ring, one rank after the other: with eight on two cores that
    # takes more than twice as long.
    every = torch.empty((group.size(), *mine.shape), dtype=mine.dtype, device=mine.device)
    rows = list(every) if group.rank() == 0 else None
    dist.gather(mine, rows, group=group, group_dst=0)
    dist.broadcast(every, group=group, group_src=0)
    found: list[list[float]] = every.tolist()
    return found


def require_mesh(mesh: Any) -> None:
    """Refuse what is no mesh with a dimension for the workers and with this process in it.

    Raises:
        TypeError: It is no mesh.
        ValueError: It lacks the dimension, or this process.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is {mesh!r}, of type {type(mesh).__name__}. Pass what "
            "torch.distributed.device_mesh.init_device_mesh has returned."
        )
    names = _names(mesh)
    if PIPE not in names:
        raise ValueError(
            f"The mesh has the dimensions {list(names)} and none named {PIPE!r}. Name one so, "
            f'such as init_device_mesh(device_type, (2, 4), mesh_dim_names=("{DATA}", "{PIPE}")).'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"Rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.flatten().tolist()}. "
            "Make the GPipe only on the ranks of its mesh."
        )


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def _dim(mesh: DeviceMesh, name: str) -> int:
    return _names(mesh).index(name)


def _lines(mesh: DeviceMesh, name: str) -> Iterator[list[int]]:
    """The ranks along a dimension, for each place in the others."""
    ranks: Tensor = mesh.mesh.movedim(_dim(mesh, name), -1)
    yield from ranks.reshape(-1, ranks.shape[-1]).tolist()


def _group_along(mesh: DeviceMesh, name: str, backend: str) -> dist.ProcessGroup:
    """A new group of those that are in one line with this process."""
    # Where ranks outside the mesh do not take part, members alone have to agree.
    only_members = mesh.size() != dist.get_world_size()
    found: dist.ProcessGroup | None = None
    for ranks in _lines(mesh, name):
        is_member = dist.get_rank() in ranks
        if only_members and not is_member:
            continue
        group = dist.new_group(ranks, backend=backend, use_local_synchronization=only_members)
        found = group if is_member else found
    assert found is not None, "this process is in the mesh"
    return found
