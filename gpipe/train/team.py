"""The processes of a run: one, or those that torchrun has started."""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, TypeVar, cast

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gpipe.data import Splits
from gpipe.execution.company import company_of
from gpipe.execution.pipe import DATA, PIPE
from gpipe.execution.waiter import Waiter
from gpipe.stage.boundary import unpack
from gpipe.stage.device import HOST, default_devices
from gpipe.stage.microbatch import Batch as Rows
from gpipe.stage.microbatch import slice_sizes
from gpipe.train.batches import Batch, num_rows
from gpipe.train.config import RunConfig
from gpipe.train.mistake import Mistake, RunFileError

__all__ = ["Team", "is_one_of_many", "joined", "torchrun_line"]

T = TypeVar("T")


class Team:
    """This process among those of the run.

    Args:
        mesh: All of them, by replica and worker; None where there is only this one.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.waiter = Waiter("the run")
        self.is_main = mesh is None or dist.get_rank() == 0
        self.num_replicas = 1 if mesh is None else mesh[DATA].size()
        self._replica = 0 if mesh is None else mesh.get_local_rank(DATA)

    @property
    def num_workers(self) -> int | None:
        """How many processes share the stages; None where all are in this one."""
        return None if self.mesh is None else self.mesh[PIPE].size()

    def require_rows(self, config: RunConfig, splits: Splits) -> None:
        """Refuse mini-batches of which a replica would get nothing.

        Raises:
            RunFileError: There are fewer rows than replicas in one.
        """
        for rows in (splits.train, splits.test):
            smallest = num_rows(rows) % config.data.batch_size or config.data.batch_size
            if smallest < self.num_replicas:
                raise RunFileError(
                    [
                        Mistake(
                            "data.batch_size",
                            f"is {config.data.batch_size}, which leaves a mini-batch of {smallest} "
                            f"of the {num_rows(rows)} rows for {self.num_replicas} replicas. "
                            "Choose another, so that each replica gets a row of every mini-batch.",
                        )
                    ]
                )

    def told(self, value: T) -> T:
        """What the main process has for this; all of them call it."""
        if self.mesh is None:
            return value
        told = [value]
        self.waiter.run(lambda: dist.broadcast_object_list(told), "what rank 0 tells")
        return told[0]

    def every(self, value: T) -> list[T]:
        """What all processes have for this, by rank."""
        if self.mesh is None:
            return [value]
        every: list[Any] = [None] * dist.get_world_size()
        self.waiter.run(lambda: dist.all_gather_object(every, value), "what other ranks tell")
        return cast("list[T]", every)

    def part(self, batch: Batch) -> Batch:
        """The rows of a mini-batch that this replica has."""
        if self.num_replicas == 1:
            return batch
        input, target = (
            unpack(Rows.of("a mini-batch", each).slices(self.num_replicas)[self._replica])
            for each in (batch.input, batch.target)
        )
        return Batch(input, target, slice_sizes(batch.num_rows, self.num_replicas)[self._replica])


def is_one_of_many() -> bool:
    """Whether torchrun, or something like it, has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def torchrun_line(config: RunConfig, words: Sequence[str]) -> str:
    """The command that starts a run as so many processes on this machine."""
    pipeline = config.pipeline
    listed = None if isinstance(pipeline.balance, str) else len(pipeline.balance)
    num_workers = pipeline.stages or listed or len(default_devices()) or 1
    num_processes = num_workers * pipeline.replicas
    return f"torchrun --nproc-per-node={num_processes} -m gpipe {shlex.join(words)}"


@contextmanager
def joined(config: RunConfig) -> Iterator[Team]:
    """Find the other processes of the run, if there are any; what fails meanwhile ends all.

    Raises:
        ConfigError: Their number does not fit the run file, or they have different ones.
        StageError: Another process has failed first.
    """
    if not is_one_of_many():
        yield Team()
        return
    _require_fit(config, int(os.environ["WORLD_SIZE"]))
    mesh = _mesh(config)
    pipeline = config.pipeline
    company = company_of(mesh, pipeline.patience_s, pipeline.watchdog_s)
    team = Team(mesh)
    company.join(team.waiter)
    with company.sharing_failures():
        company.require_agreement({"the run file": _digest(config)})
        yield team
    company.leave()
    dist.destroy_process_group()


def _mesh(config: RunConfig) -> DeviceMesh:
    accelerators = default_devices()
    kind = accelerators[0].type if accelerators else HOST.type
    if accelerators:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        both = f"{HOST.type}:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    dist.init_process_group(both if accelerators else "gloo")
    num_replicas = config.pipeline.replicas
    shape = num_replicas, dist.get_world_size() // num_replicas
    return init_device_mesh(kind, shape, mesh_dim_names=(DATA, PIPE))


def _require_fit(config: RunConfig, num_processes: int) -> None:
    pipeline = config.pipeline
    if num_processes % pipeline.replicas:
        raise _mistake(
            "replicas",
            f"is {pipeline.replicas}, and there are {num_processes} processes, which cannot be "
            "shared out to so many. Start a multiple of it.",
        )
    if pipeline.devices is not None:
        raise _mistake(
            "devices",
            "lists devices, and each of several processes has that of its local rank. Leave it "
            "out, or start one process.",
        )


def _mistake(key: str, text: str) -> RunFileError:
    return RunFileError([Mistake(f"pipeline.{key}", text)])


def _digest(config: RunConfig) -> str:
    # Not as JSON: pydantic would warn of a balance that lists layers.
    return sha256(repr(config).encode()).hexdigest()[:16]
