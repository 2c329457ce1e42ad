"""Which layers are on which worker, and which of them are in this process."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Self, SupportsIndex

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from gpipe.arguments import require_choice, require_count
from gpipe.balance import balance_by_parameters, require_balance
from gpipe.execution.company import Company, company_of
from gpipe.execution.distributed import DistributedEngine, PipeEnds
from gpipe.execution.engine import Engine
from gpipe.execution.orders import Orders
from gpipe.execution.pipe import DATA, PIPE, Pipe, require_mesh
from gpipe.execution.relay import ties_of
from gpipe.execution.replicas import ALL_REDUCES, BUCKET_BYTES, AllReduce, Replicas
from gpipe.execution.same_start import require_same_start
from gpipe.execution.skip_channel import Route
from gpipe.execution.threaded import ThreadedExecutor
from gpipe.schedule import LOOPED_SCHEDULES, Builder, Schedule
from gpipe.stage.batchnorm import DeferredBatchNorm
from gpipe.stage.device import default_devices, own_device
from gpipe.stage.elsewhere import Elsewhere
from gpipe.stage.materialise import materialise
from gpipe.stage.placement import require_devices
from gpipe.stage.sharded import require_same_layers
from gpipe.stage.skip_route import skip_routes
from gpipe.stage.stage import Stage

__all__ = ["Layout", "OnMesh", "num_workers_of"]

Devices = Sequence[torch.device | str]


Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module]
"""Spreads a stage over further dimensions of a mesh: (stage, mesh) -> stage."""


class OnMesh(NamedTuple):
    """How the processes of a mesh work together; see `GPipe`."""

    mesh: DeviceMesh
    dynamic_shapes: bool = False
    all_reduce: AllReduce = "backend"
    bucket_bytes: int = BUCKET_BYTES
    parallelize: Parallelize | None = None
    patience_s: float = 8.0
    watchdog_s: float | None = None
    shares_moments: bool = False

    @classmethod
    def of(cls, mesh: DeviceMesh | None, *options: Any) -> Self | None:
        """These options, where there is a mesh; they are refused in any case.

        Raises:
            TypeError: One is of the wrong type.
            ValueError: One is not possible, or a dimension of the mesh would be left unused.
        """
        found = cls(mesh, *options)  # type: ignore[arg-type]
        require_choice("all_reduce", found.all_reduce, ALL_REDUCES)
        require_count("bucket_bytes", found.bucket_bytes)
        if mesh is None:
            return None
        require_mesh(mesh)
        names = [name for name in mesh.mesh_dim_names or () if name not in (DATA, PIPE)]
        if found.parallelize is None and any(mesh[name].size() > 1 for name in names):
            raise ValueError(
                f"The mesh has the dimension {names[0]!r}, over which nothing is spread. Name it "
                f"{DATA!r} for replicas whose gradients are summed, or pass `parallelize`."
            )
        return found

    @property
    def company(self) -> Company:
        """All processes of the mesh."""
        return company_of(self.mesh, self.patience_s, self.watchdog_s)

    def replicas(self, pipe: Pipe) -> Replicas:
        """What sums gradients over the replicas."""
        all_reduce: AllReduce = self.all_reduce if pipe.num_replicas > 1 else "none"
        order = pipe.replicas_by_host() if all_reduce == "ring" else None
        return Replicas(
            pipe.replicas,
            all_reduce=all_reduce,
            bucket_bytes=self.bucket_bytes,
            ring_order=order,
        )


class Layout:
    """Where the layers of a model are.

    Args:
        layers: All layers, in order.
        balance: Layers per stage; or the number of stages; or None for one stage per worker.
        chunks: Micro-batches of a full mini-batch.
        schedule: Says how the workers share the stages.
        devices: One per worker.
        on_mesh: How the processes work together, one for each worker; None where all workers are
            in this one.

    Raises:
        ValueError: These do not go together.
        PlanError: There are fewer layers than stages.
        ScheduleError: The schedule is for other sizes, incomplete, disordered or deadlocked.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        balance: int | Sequence[int] | None,
        chunks: int,
        schedule: str | Schedule | Builder,
        devices: Devices | None,
        on_mesh: OnMesh | None,
    ) -> None:
        self.on_mesh = on_mesh
        # First of all, so that whatever fails from here on ends all processes.
        self._company = None if on_mesh is None else on_mesh.company
        self.pipe = None if on_mesh is None else Pipe(on_mesh.mesh)
        num_workers = self.pipe.num_workers if self.pipe else _num_devices(devices)
        self.balance = _balance(layers, balance, max(1, num_workers))
        if self.pipe is None or not _is_looped(schedule):
            num_workers = num_workers_of(schedule, devices) or 0
        self._schedule, self._chunks = schedule, chunks
        self._classes = [type(layer).__name__ for layer in layers]
        self.routes = self._routes(layers)
        self.orders = self._make_orders(num_workers or None)
        self.devices = self._devices(devices)
        parameters = [list(layer.parameters()) for layer in layers]
        self.ties = ties_of(parameters, self.workers, self.pipe.worker) if self.pipe else []

    @property
    def workers(self) -> list[int]:
        """The worker of each layer."""
        pairs = zip(self.orders.worker_of, self.balance, strict=True)
        return [worker for worker, size in pairs for _ in range(size)]

    def kept(self, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module | None]:
        """The layers of this process, and what stands for the others."""
        kept: dict[str, nn.Module | None] = OrderedDict()
        for (name, layer), worker in zip(layers.items(), self.workers, strict=True):
            is_here = self.pipe is None or worker == self.pipe.worker
            kept[name] = layer if is_here else Elsewhere(type(layer).__name__, worker)
        return kept

    def stages(self, layers: Mapping[str, nn.Module]) -> list[Stage]:
        """Those of this process, with their layers settled on the devices."""
        names, modules = list(layers), list(layers.values())
        settled: dict[Parameter, Parameter] = {}
        ends = list(accumulate(self.balance))
        stages = []
        for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            worker = self.orders.worker_of[index]
            if self.pipe is None or worker == self.pipe.worker:
                device = self.devices[worker if self.pipe is None else 0]
                own = self._parallelized(names[start:end], modules[start:end], device)
                stages.append(Stage(index, names[start:end], own, start, device, settled))
        return stages

    def materialise(self, layers: Sequence[nn.Module], seed: int) -> None:
        """Give layers of this process that are on meta their memory and their first values.

        Args:
            layers: All layers of the model.
            seed: That of the model, the same in all processes.

        Raises:
            ValueError: Something would stay without a value; all of it is named.
        """
        by_index = dict(enumerate(layers))
        own = {self.pipe.worker: self.devices[0]} if self.pipe else dict(enumerate(self.devices))
        for worker, device in own.items():
            wanted = [index for index, each in enumerate(self.workers) if each == worker]
            materialise(by_index, wanted, device, seed)
        if self.pipe is not None:
            own_layers = [by_index[index] for index in wanted]
            require_same_start(own_layers, self.ties, self.pipe)

    def _parallelized(
        self, names: Sequence[str], layers: Sequence[nn.Module], device: torch.device
    ) -> list[nn.Module]:
        if self.on_mesh is None or self.on_mesh.parallelize is None:
            return list(layers)
        given = nn.Sequential(OrderedDict(zip(names, layers, strict=True))).to(device)
        before = {id(parameter) for parameter in given.parameters()}
        stage = require_same_layers(self.on_mesh.parallelize(given, self.on_mesh.mesh), given)
        after = {id(parameter) for layer in stage for parameter in layer.parameters()}
        if any(id(tie.parameter) in before - after for tie in self.ties):
            raise ValueError(
                "parallelize replaced a parameter that layers of several workers share, so that "
                "its gradients would not be summed. Leave these layers as they are."
            )
        return stage

    def engine(self, stages: Sequence[Stage], norms: Sequence[DeferredBatchNorm]) -> Engine:
        """What drives mini-batches through the stages of this process."""
        if self.pipe is None or self.on_mesh is None or self._company is None:
            executor = ThreadedExecutor(self.orders.num_workers)
            return Engine(stages, executor, self.routes, norms)
        worker_of = self.orders.worker_of
        ends = PipeEnds(worker_of[0], worker_of[-1])
        return DistributedEngine(
            stages,
            self.pipe,
            ends,
            self.routes,
            norms,
            self.ties,
            company=self._company,
            replicas=self.on_mesh.replicas(self.pipe),
            counts_alike=self.on_mesh.parallelize is not None,
            shares_moments=self.on_mesh.shares_moments,
            dynamic_shapes=self.on_mesh.dynamic_shapes,
        )

    def require_agreement(self, facts: Mapping[str, str | int]) -> None:
        """Let all processes compare how they were started.

        Args:
            facts: What else has to be the same, by name.

        Raises:
            ConfigError: Something differs.
        """
        if self.on_mesh is None or self._company is None:
            return
        self._company.require_agreement(
            {
                "the number of layers": len(self._classes),
                "the classes of the layers": ", ".join(self._classes),
                **facts,
                "balance": str(self.balance),
                "chunks": self._chunks,
                "schedule": self.orders.describe(self._chunks),
                "all_reduce": self.on_mesh.all_reduce,
                "bucket_bytes": self.on_mesh.bucket_bytes,
                "dynamic_shapes": str(self.on_mesh.dynamic_shapes),
                "deferred_batch_norm for replicas": str(self.on_mesh.shares_moments),
            }
        )

    def update(self, layers: Sequence[nn.Module]) -> None:
        """Take in that layers have been exchanged, or that all this is a copy.

        Raises:
            RuntimeError: Other processes would know nothing of it.
        """
        if self.pipe is not None:
            raise RuntimeError(
                "A layer was exchanged, of which the other processes of the mesh know nothing. "
                "Exchange it in the Sequential, and make the GPipe on all of them anew."
            )
        self.routes = self._routes(layers)
        self.orders = self._make_orders(len(self.devices))

    def __getstate__(self) -> dict[str, Any]:
        derived = ("routes", "orders")
        return {name: value for name, value in vars(self).items() if name not in derived}

    def _make_orders(self, num_workers: int | None) -> Orders:
        orders = Orders(
            self._schedule,
            len(self.balance),
            self._chunks,
            num_workers,
            skips=[(stash, pop) for _, stash, pop in self.routes],
            has_transfers=self.pipe is not None,
        )
        if self.pipe is not None and orders.num_workers != self.pipe.num_workers:
            raise ValueError(
                f"The schedule has {orders.num_workers} workers and the mesh has "
                f"{self.pipe.num_workers} along 'pipe'. Let the two be equal, by the number of "
                "stages or by the size of the mesh."
            )
        return orders

    def _devices(self, devices: Devices | None) -> list[torch.device]:
        """One for each worker of this process."""
        if self.on_mesh is None:
            return require_devices(devices, self.orders.num_workers)
        if devices is not None and len(devices) != 1:
            raise ValueError(
                f"There are {len(devices)} devices, and on a mesh a process has one worker. Pass "
                "`devices` with that of this process, or leave it out."
            )
        return require_devices(devices or [own_device(self.on_mesh.mesh.device_type)], 1)

    def _routes(self, layers: Sequence[nn.Module]) -> list[Route]:
        """The skips that go from one stage to another."""
        stage_of = [stage for stage, size in enumerate(self.balance) for _ in range(size)]
        routes = (
            Route(skip.key, stage_of[skip.stash_layer], stage_of[skip.pop_layer])
            for skip in skip_routes(layers)
        )
        return [route for route in routes if route.stash_stage != route.pop_stage]


def num_workers_of(schedule: str | Schedule | Builder, devices: Devices | None) -> int | None:
    """How many workers share the stages, where that is not for the schedule to say."""
    return _num_devices(devices) or None if _is_looped(schedule) else None


def _is_looped(schedule: str | Schedule | Builder) -> bool:
    return isinstance(schedule, str) and schedule in LOOPED_SCHEDULES


def _num_devices(devices: Devices | None) -> int:
    return len(default_devices() if devices is None else devices)


def _balance(
    layers: Sequence[nn.Module], balance: int | Sequence[int] | None, num_workers: int
) -> list[int]:
    balance = num_workers if balance is None else balance
    if isinstance(balance, SupportsIndex):
        module = nn.Sequential(*layers)
        return balance_by_parameters(require_count("balance", balance), module)
    return require_balance(balance, len(layers))
