"""What ranks hold of a model that was built on meta."""

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gpipe import GPipe
from tests.distributed.four_ranks import mesh_of, on_mesh

__all__ = ["MESHES", "in_threads", "part", "part_bytes", "tied_part", "total_bytes"]

SEED = 11
MESHES: dict[str, dict[str, int]] = {
    "two workers": {"data": 2, "pipe": 2},
    "four workers": {"pipe": 4},
}
WIDTH, WORDS = 64, 50


class Head(nn.Module):
    """Has the weight of the embedding, and something of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.logits = nn.Linear(WIDTH, WORDS)
        self.logits.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


def model(*, is_tied: bool) -> nn.Sequential:
    """On meta: layers of many kinds, two of which may share a weight."""
    with torch.device("meta"):
        embedding = nn.Embedding(WORDS, WIDTH)
        return nn.Sequential(
            embedding,
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True),
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
            Head(embedding.weight) if is_tied else nn.Linear(WIDTH, WORDS),
        )


def state_of(made: GPipe) -> dict[str, Tensor]:
    assert not any(each.is_meta for each in made.state_dict().values())
    return {name: each.clone() for name, each in made.state_dict().items()}


def in_threads(num_stages: int) -> dict[str, Tensor]:
    """The first values with all stages in this process."""
    whole = model(is_tied=True)
    made = GPipe(whole, num_stages, 2, devices=["cpu"] * num_stages, seed=SEED)
    assert whole[0].weight is whole[6].logits.weight
    return state_of(made)


def part(rank: int, mesh: str) -> dict[str, Tensor]:
    """In a rank: the first values of what is here. Torch is seeded otherwise on each rank."""
    torch.manual_seed(rank)
    sizes = MESHES[mesh]
    with on_mesh(model(is_tied=True), sizes["pipe"], 2, mesh=mesh_of(**sizes), seed=SEED) as made:
        return state_of(made)


def tied_part(rank: int, mesh: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """In a rank: gradients of a step, and the weights after it. The ends share a weight."""
    sizes = MESHES[mesh]
    x = torch.arange(6) % 5
    module = model(is_tied=True)
    module[3], module[5] = nn.Tanh(), nn.Tanh()
    with on_mesh(module, sizes["pipe"], 2, mesh=mesh_of(**sizes), seed=SEED) as made:
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        made.step(x, x, nn.CrossEntropyLoss())
        optimizer.step()
        named = made.named_parameters(remove_duplicate=False)
        gradients = {name: each.grad for name, each in named if each.grad is not None}
        return gradients, state_of(made)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of what is not on meta, each memory once."""
    real = (each for each in tensors if not each.is_meta)
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in real}
    return sum(each.nbytes() for each in storages.values())


def total_bytes() -> int:
    return sum(each.nbytes for each in model(is_tied=False).state_dict().values())


def alive() -> int:
    """The bytes of all tensors that Python knows of in this process."""
    gc.collect()
    objects: list[Any] = gc.get_objects()
    return bytes_of(each for each in objects if issubclass(type(each), Tensor))


def part_bytes(rank: int, mesh: str) -> tuple[int, int]:
    """In a rank: bytes of its part, and by how many all that lives has grown."""
    sizes, meshes = MESHES[mesh], mesh_of(**MESHES[mesh])
    module, before = model(is_tied=False), alive()
    with on_mesh(module, sizes["pipe"], 2, mesh=meshes, seed=SEED) as made:
        return bytes_of(made.state_dict().values()), alive() - before
