"""What ranks do in `test_odd_uses`."""

import gc
import weakref
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from gpipe import GPipe
from gpipe.errors import ConfigError
from tests.distributed.four_ranks import mesh_of, on_mesh

__all__ = [
    "Beside",
    "begun_before_the_others",
    "beside_the_loss",
    "kept_alive",
    "made_in_inference_mode",
    "made_unlike",
    "on_a_dimension_without_use",
    "rows_of",
    "three_layers",
    "told_beside",
    "under_another_default_device",
    "with_wrapped_layers",
    "without_a_target",
    "without_valid_targets",
]

WIDTH = 4


def three_layers(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers).double()


def rows_of(replica: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(3 + replica)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: each.grad for name, each in named if each.grad is not None}


def without_valid_targets(_: int) -> tuple[float, dict[str, Tensor]]:
    """The second replica has none."""
    mesh = mesh_of(data=2, pipe=2)
    replica = mesh.get_local_rank("data")
    target = torch.tensor([[0, 1, 2, 1], [-100] * 4][replica])
    with on_mesh(three_layers(), 2, 2, mesh=mesh) as model:
        result = model.step(rows_of(replica), target, nn.CrossEntropyLoss())
        return result.loss.item(), gradients(model)


def made_unlike(rank: int, tied: bool) -> str:
    """Every rank has a seed of its own."""
    module = three_layers(100 + rank)
    if tied:
        module[3].weight = module[0].weight
    mesh = mesh_of(pipe=4) if tied else mesh_of(data=2, pipe=2)
    try:
        GPipe(module, 4 if tied else 2, mesh=mesh)
    except ConfigError as error:
        return str(error)
    return "nothing was said"


class Beside(nn.Module):
    """A loss that uses a weight of the model."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output @ self.weight, target)


def beside_the_loss(_: int, tied: bool) -> dict[str, Tensor]:
    module = three_layers()
    if tied:
        module[3].weight = module[0].weight
    with on_mesh(module, 4, 2, mesh=mesh_of(pipe=4)) as model:
        model.step(rows_of(), rows_of(1), Beside(module[3].weight))
        return gradients(model)


class Tells(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        store = dist.distributed_c10d._get_default_store()
        store.set("first forward", "has begun")
        return value


def begun_before_the_others(rank: int) -> float:
    """Only the first stage tells; the others come when it has."""
    store = dist.distributed_c10d._get_default_store()
    layers = [Tells(), *three_layers()]
    with on_mesh(nn.Sequential(*layers), [2, 1, 1, 1], 2, mesh=mesh_of(pipe=4)) as model:
        if rank > 0:
            store.wait(["first forward"], timedelta(seconds=20))
        return model.step(rows_of(), rows_of(1), nn.MSELoss()).loss.item()


def on_a_dimension_without_use(_: int) -> str:
    try:
        GPipe(three_layers(), 2, mesh=mesh_of(dp=2, pipe=2))
    except ValueError as error:
        return str(error)
    return "nothing was said"


def without_a_target(_: int) -> float:
    with on_mesh(three_layers(), 4, 2, mesh=mesh_of(pipe=4)) as model:
        return model.step(rows_of(), None, lambda output, _: output.square().mean()).loss.item()


def under_another_default_device(_: int) -> float:
    rows = rows_of()
    with on_mesh(three_layers(), 4, 2, mesh=mesh_of(pipe=4)) as model, torch.device("meta"):
        return model.step(rows, rows, nn.MSELoss()).loss.item()


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Any) -> Any:
        return self.layer(value)


def wrap(stage: nn.Sequential, _: object) -> nn.Sequential:
    for name, layer in list(stage.named_children()):
        setattr(stage, name, Wrapped(layer))
    return stage


def with_wrapped_layers(_: int) -> float:
    with on_mesh(three_layers(), 4, 2, mesh=mesh_of(pipe=4), parallelize=wrap) as model:
        return model.step(rows_of(), rows_of(1), nn.MSELoss()).loss.item()


def kept_alive(_: int) -> bool:
    """Whether this rank has a parameter that the first and the last worker share."""
    module = three_layers()
    module[3].weight = module[0].weight
    seen = weakref.ref(module[0].weight)
    model = GPipe(module, 4, 2, mesh=mesh_of(pipe=4))
    del module
    gc.collect()
    is_there = seen() is not None
    dist.barrier()
    model.close()
    return is_there


def made_in_inference_mode(_: int) -> list[float]:
    """And used there first, then outside."""
    module, mesh = three_layers(), mesh_of(pipe=4)
    with torch.inference_mode():
        model = GPipe(module, 4, 2, mesh=mesh)
        inside = model.step(rows_of(), rows_of(1), nn.MSELoss()).loss.item()
    outside = [model.step(rows_of(), rows_of(1), nn.MSELoss()).loss.item() for _ in range(2)]
    model.close()
    return [inside, *outside]


class Telling(nn.Module):
    """Passes on what is no tensor beside its input."""

    def __init__(self, beside: Any) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return x, self.beside


class Heeding(nn.Module):
    def forward(self, both: tuple[Tensor, Any]) -> Tensor:
        x, beside = both
        return x * len(repr(beside))


def told_beside(_: int, beside: Any) -> tuple[list[float], int]:
    """Three losses, and how many ways of looking are kept."""
    module = nn.Sequential(Telling(beside), Heeding(), *three_layers()[:3:2]).double()
    with on_mesh(module, [1, 1, 1, 1], 2, mesh=mesh_of(pipe=4)) as model:
        losses = [model.step(rows_of(), rows_of(1), nn.MSELoss()).loss.item() for _ in range(3)]
        kept = model._engine._words._forms.values()
        return losses, sum(len(forms) for forms in kept)
