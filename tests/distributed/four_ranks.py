"""Four processes that several test modules share, as meshes of two by two or of four."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gpipe import GPipe
from tests.distributed.team import Team

__all__ = ["four_ranks", "mesh_of", "on_mesh"]

_teams: list[Team] = []


def four_ranks(request: pytest.FixtureRequest) -> Team:
    """The processes, which start with their first call and end with the session."""
    if not _teams:
        _teams.append(Team(4))
        request.session.addfinalizer(_end)
    return _teams[0]


def _end() -> None:
    _teams.pop().close()


@cache
def mesh_of(**sizes: int) -> DeviceMesh:
    """In a rank: all four of them, with these dimensions."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@contextmanager
def on_mesh(module: nn.Sequential, *args: Any, mesh: DeviceMesh, **options: Any) -> Iterator[GPipe]:
    """In a rank: a GPipe whose groups are given back, or hundreds of them have many threads."""
    model = GPipe(module, *args, mesh=mesh, **options)
    yield model
    dist.barrier()  # nothing is on its way any more
    assert model._layout.pipe is not None
    model._engine._replicas.close()  # type: ignore[attr-defined]
    model._layout.pipe.close()
