"""What ranks train whose stages are spread over a further dimension of the mesh."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gpipe import GPipe, clip_grad_norm_
from tests.distributed.four_ranks import mesh_of, on_mesh

__all__ = ["KINDS", "WRONG_HOOKS", "Seen", "as_it_is", "refused", "spread"]

WIDTH, ROWS, NUM_STEPS = 8, 10, 4


class Block(nn.Module):
    """Of which the hidden units can be shared out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Seen(NamedTuple):
    """Losses and norms by step, the last gradients and the weights, whole, by name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    local_elements: int


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    blocks = (Block() for _ in range(3))
    return nn.Sequential(nn.Linear(6, WIDTH), *blocks, nn.Linear(WIDTH, 3)).double()


def shard(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 over the replicas."""
    from torch.distributed.fsdp import fully_shard

    for layer in stage.children():
        fully_shard(layer, mesh=mesh["data"])
    return stage


def share_out(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism: each rank has some of the hidden units."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    for layer in stage.children():
        if isinstance(layer, Block):
            plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
    return stage


Hook = Callable[[nn.Module, DeviceMesh], Any]
KINDS: dict[str, tuple[Hook, dict[str, int]]] = {
    "fully_shard": (shard, {"data": 2, "pipe": 2}),
    "tensor parallel": (share_out, {"pipe": 2, "tp": 2}),
}


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (ROWS,), generator=generator)


def trained(model: nn.Module, step: Callable[[], Tensor]) -> Seen:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(step().item())
        norms.append(float(clip_grad_norm_(model, 0.5)))
        optimizer.step()
    gradients = {name: whole(each.grad) for name, each in model.named_parameters()}
    state = {name: whole(each) for name, each in model.state_dict().items()}
    num_local = sum(local(each).numel() for each in model.parameters())
    return Seen(losses, norms, gradients, state, num_local)


def whole(tensor: Any) -> Tensor:
    """All of a tensor of which others may have parts; they all ask for it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def as_it_is() -> Seen:
    """The plain model on all rows."""
    module, (x, y) = layers(), rows()

    def step() -> Tensor:
        loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()
        return loss.detach()

    return trained(module, step)


def spread(rank: int, kind: str, schedule: str, checkpoint: str, num_first: int) -> Seen:
    """In a rank: its part of its stages. The replicas, if there are any, have uneven rows."""
    hook, sizes = KINDS[kind]
    mesh, (x, y) = mesh_of(**sizes), rows()
    if "data" in sizes:
        parts = [num_first, ROWS - num_first]
        x, y = (each.split(parts)[mesh.get_local_rank("data")] for each in (x, y))
    options = {"schedule": schedule, "checkpoint": checkpoint, "parallelize": hook}
    num_stages = 4 if "1f1b" in schedule and schedule != "1f1b" else 2
    with on_mesh(layers(), num_stages, 4, mesh=mesh, **options) as model:
        return trained(model, lambda: model.step(x, y, nn.CrossEntropyLoss()).loss)


def nothing(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Forgets to return."""
    shard(stage, mesh)


def fewer(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.Sequential(*list(stage.children())[:-1])


def renamed(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(each) for each in stage.children()), nn.Identity())


def as_a_list(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.ModuleList(stage.children())


def as_a_whole(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(stage, mesh=mesh["data"])


WRONG_HOOKS: dict[str, tuple[Hook, type[Exception], str]] = {
    "nothing": (nothing, TypeError, "parallelize returned a NoneType. Return the stage that it"),
    "a list": (as_a_list, TypeError, "parallelize returned a ModuleList. Return the stage that"),
    "fewer layers": (fewer, ValueError, "parallelize returned a stage with the layers"),
    "more layers": (renamed, ValueError, "Keep the layers; what is in them may change."),
    "the whole stage sharded": (
        as_a_whole,
        ValueError,
        "parallelize called fully_shard with the whole stage, whose layers are called one by one.",
    ),
}


def refused(rank: int, name: str) -> str:
    """In a rank: what is said of a wrong hook."""
    hook, kind, _ = WRONG_HOOKS[name]
    with pytest.raises(kind) as caught:
        GPipe(layers(), 2, 4, mesh=mesh_of(data=2, pipe=2), parallelize=hook)
    return str(caught.value)
