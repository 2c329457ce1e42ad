"""What the ranks of two replicas train, and what is to come of it."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe import GPipe
from tests.distributed.four_ranks import mesh_of, on_mesh

__all__ = [
    "LOSSES",
    "Case",
    "Seen",
    "drawn",
    "drawn_alone",
    "in_one_process",
    "in_order",
    "joined",
    "norms_alone",
    "on_replicas",
    "rows",
    "with_norms",
]

WIDTH, ROWS = 6, 10


class Case(NamedTuple):
    """What is trained, and how."""

    loss: str = "mean"
    sizes: Sequence[int] = (5, 5)
    schedule: str = "1f1b"
    stages: int = 2
    all_reduce: str = "backend"
    bucket_bytes: int = 2**20
    module: str = "plain"
    dtype: torch.dtype = torch.float64
    num_steps: int = 3

    def __str__(self) -> str:
        return "-".join(str(each) for each in self).replace("torch.", "").replace(" ", "")


class Seen(NamedTuple):
    """Losses by step, gradients of the last step and weights, by name."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Rows count by their targets."""
    weight = target.clamp(min=0).to(output.dtype) + 0.5
    return (output.square().sum(dim=1) * weight).sum(), weight.sum()


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.sum(dim=1) - target).square().mean()


class TrainedLoss(nn.Linear):
    """Has a head of its own."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__(WIDTH, WIDTH)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (super().forward(output).sum(dim=1) - target).square().mean()


LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    "mean": (lambda: squares, "mean"),
    "sum": (partial(nn.CrossEntropyLoss, reduction="sum"), "sum"),
    "weighted": (lambda: weighted, "weighted"),
    "ignored targets": (nn.CrossEntropyLoss, "mean"),
    "trained": (TrainedLoss, "mean"),
}


class Tied(nn.Module):
    """Projects with the weight of another layer."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(7)),
        nn.Linear(WIDTH, WIDTH),
    )


def tied() -> nn.Sequential:
    """The first layer's weight is that of the last, and of one between."""
    module = plain()
    first: Any = module[0]
    module[5], module[7] = Tied(first[0].weight), Tied(first[0].weight)
    return module


MODULES = {"plain": plain, "tied": tied}


def rows(case: Case) -> tuple[Tensor, Tensor]:
    """The mini-batch that the replicas share; of its targets some are ignored."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(0, WIDTH, (ROWS,), generator=generator)
    if case.loss in ("ignored targets", "sum"):
        y[[1, 2, 8]] = -100
    return x.to(case.dtype), y


class Plain(nn.Sequential):
    """A plain model with the face of a GPipe."""

    def step(self, x: Tensor, y: Tensor, loss_fn: Any, *, loss_reduction: str) -> "Plain.Result":
        loss = loss_fn(self(x), y)
        if isinstance(loss, tuple):
            loss = loss[0] / loss[1]
        loss.backward()
        return Plain.Result(loss.detach())

    class Result(NamedTuple):
        loss: Tensor


def trained(model: Any, case: Case, x: Tensor, y: Tensor) -> Seen:
    make, reduction = LOSSES[case.loss]
    loss_fn = make()
    named = dict(model.named_parameters(remove_duplicate=False))  # a tie has one elsewhere, too
    if isinstance(loss_fn, nn.Module):
        loss_fn.to(case.dtype)
        named |= {f"loss.{name}": each for name, each in loss_fn.named_parameters()}
    optimizer = torch.optim.SGD(dict.fromkeys(named.values()), lr=0.02)
    losses = []
    for _ in range(case.num_steps):
        optimizer.zero_grad()
        losses.append(model.step(x, y, loss_fn, loss_reduction=reduction).loss.item())
        optimizer.step()
    gradients = {name: each.grad for name, each in named.items() if each.grad is not None}
    return Seen(losses, gradients, dict(model.state_dict()))


def in_one_process(case: Case) -> Seen:
    """The plain model on the mini-batch of all replicas."""
    module = Plain(*MODULES[case.module]()).to(case.dtype)
    return trained(module, case, *rows(case))


def on_replicas(rank: int, case: Case) -> Seen:
    """In a rank: its part of its replica, on the rows of that."""
    mesh = mesh_of(data=2, pipe=2)
    names = "schedule", "all_reduce", "bucket_bytes"
    options = {name: getattr(case, name) for name in names}
    module = MODULES[case.module]().to(case.dtype)
    with on_mesh(module, case.stages, 3, mesh=mesh, **options) as model:
        x, y = (each.split(list(case.sizes))[mesh.get_local_rank("data")] for each in rows(case))
        return trained(model, case, x, y)


def joined(every: Sequence[Seen]) -> Seen:
    """What the two workers of a replica have, together."""
    first, last = every
    assert first.losses == last.losses
    return Seen(first.losses, first.gradients | last.gradients, first.state | last.state)


def drawing() -> nn.Sequential:
    return nn.Sequential(*(nn.Dropout(0.5) for _ in range(4)), nn.Linear(WIDTH, WIDTH))


def drawn(rank: int) -> list[Tensor | None]:
    """In a rank: the outputs of dropout, which has the same input in both replicas."""
    torch.manual_seed(0)
    mesh = mesh_of(data=2, pipe=2)
    with on_mesh(drawing(), 2, 3, mesh=mesh) as model:
        return outputs_of(model)


def drawn_alone() -> list[Tensor | None]:
    torch.manual_seed(0)
    return outputs_of(GPipe(drawing(), 2, 3, devices=["cpu"] * 2))


def outputs_of(model: GPipe) -> list[Tensor | None]:
    x, found = torch.ones(ROWS, WIDTH), []
    for _ in range(2):
        output = model.step(x, torch.zeros(ROWS), squares, return_output=True).output
        found.append(None if output is None else output.detach())
    return found


def norms() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    ).double()


def with_norms(rank: int, deferred: bool | str, sizes: Sequence[int]) -> dict[str, Tensor]:
    """In a rank: the statistics after two steps, where the norm is."""
    mesh = mesh_of(data=2, pipe=2)
    x, y = rows(Case())
    part = x.split(list(sizes))[mesh.get_local_rank("data")]
    target = y.split(list(sizes))[mesh.get_local_rank("data")]
    with on_mesh(norms(), 2, 3, mesh=mesh, deferred_batch_norm=deferred) as model:
        for _ in range(2):
            model.step(part, target, squares)
        return {name: each.clone() for name, each in model.named_buffers()}


def norms_alone(x: Tensor) -> dict[str, Tensor]:
    """The statistics of the plain model after two steps."""
    module = norms()
    for _ in range(2):
        module(x)
    return dict(module.named_buffers())


BEGUN = "the last stage is summed"
PATIENCE_S = 20


class Recorded(torch.autograd.Function):
    """The identity, whose backward is an event."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return gradient, None


class Notes(nn.Linear):
    """Tells when it goes backward."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__(WIDTH, WIDTH)
        self._note = note

    def forward(self, x: Tensor) -> Tensor:
        return Recorded.apply(super().forward(x), self._note)


@contextmanager
def noting_sums(note: Callable[[], None]) -> Any:
    """Tell of each sum of floating-point numbers that is started."""
    all_reduce = dist.all_reduce

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point():
            note()
        return all_reduce(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", noted)
        yield


def in_order(rank: int, schedule: str, num_stages: int) -> list[str]:
    """In a rank: backwards and starts of sums. The drain ends only if the last worker sums before.

    The first stage's last backward waits for the news that the last stage's sum has begun: were it
    to begin at the end, nothing would ever move.
    """
    mesh = mesh_of(data=2, pipe=2)
    store = dist.distributed_c10d._get_default_store()
    is_last = mesh.get_local_rank("pipe") == 1
    told = f"{BEGUN}, {schedule}, {mesh.get_local_rank('data')}"
    events: list[str] = []

    def backward(stage: int) -> None:
        events.append(f"backward {stage}")
        if stage == 0 and events.count("backward 0") == 4:
            store.wait([told], timedelta(seconds=PATIENCE_S))

    def sum_begins() -> None:
        events.append("sum")
        if is_last:
            store.set(told, "")

    module = nn.Sequential(*(Notes(partial(backward, stage)) for stage in range(num_stages)))
    with (
        on_mesh(module, num_stages, 4, mesh=mesh, schedule=schedule) as model,
        noting_sums(sum_begins),
    ):
        model.step(torch.ones(8, WIDTH), torch.zeros(8), squares)
    return events
