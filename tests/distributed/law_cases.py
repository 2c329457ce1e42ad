"""What is trained on the processes of a mesh, in threads and as it is."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpipe import Namespace
from tests.distributed.law_case import Case
from tests.distributed.law_crossings import ENDS, VALUES
from tests.laws.parts import Across, Leave, Meet, NestedCheckpoint
from tests.laws.values import Do
from tests.members import mlp

__all__ = ["BATCHES", "CASES", "LAYERS", "LOSSES", "SKIPS", "TIES"]


Batch = tuple[Any, Any]


def batch(num_rows: int, seed: int = 0, *shape: int, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, num_rows, *(shape or (6,)), generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def batches(*sizes: int, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """One for each number of rows."""
    return [batch(size, seed, dtype=dtype) for seed, size in enumerate(sizes)]


three = partial(batches, 13, 13, 13)
three_floats = partial(three, dtype=torch.float32)


def seeded(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    """Makes a Sequential in double precision, the same each time."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(layer() for layer in layers)).double()

    return make


linear = partial(nn.Linear, 6, 6)
plain = seeded(linear, nn.Tanh, linear, nn.Tanh, linear, nn.Tanh, linear)


def drawing() -> nn.Sequential:
    """In float32, where the order of a sum is seen, with buffers and dropout in several stages."""
    torch.manual_seed(0)
    return nn.Sequential(
        linear(), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.ReLU(inplace=True),
        linear(), nn.Dropout(0.5), nn.Tanh(), nn.BatchNorm1d(6), linear(),
    )  # fmt: skip


def classes(*targets: int) -> Callable[[], list[Batch]]:
    """Two steps with these targets."""
    return lambda: [(batch(len(targets), seed)[0], torch.tensor(targets)) for seed in range(2)]


def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Rows count by how much is in their targets."""
    weight = target.abs().sum(dim=1)
    return ((output - target).square().sum(dim=1) * weight).sum(), weight.sum()


class TrainedLoss(nn.Linear):
    """Has a head of its own."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__(6, 6, dtype=torch.float64)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (super().forward(output) - target).square().mean()


class_weights = torch.linspace(0.5, 2, 6, dtype=torch.float64)
IGNORED = (0, 5, -100, 2, -100, -100, -100, 1, 3, 3, 4)  # the third of five micro-batches has none
LOSSES: dict[str, Case] = {
    "mean": Case(plain, three),
    "sum": Case(
        plain, three, partial(nn.MSELoss, reduction="sum"), arguments={"loss_reduction": "sum"}
    ),
    "weighted": Case(plain, three, lambda: weighted, arguments={"loss_reduction": "weighted"}),
    "ignored targets": Case(plain, classes(*IGNORED), nn.CrossEntropyLoss),
    "class weights": Case(
        plain, classes(*IGNORED), lambda: nn.CrossEntropyLoss(class_weights, label_smoothing=0.1)
    ),
    "negative log-likelihood": Case(
        seeded(linear, nn.Tanh, linear, partial(nn.LogSoftmax, dim=1)),
        classes(*IGNORED),
        lambda: nn.NLLLoss(class_weights),
    ),
    "loss scale": Case(plain, three, arguments={"loss_scale": 1024.0}),
    "trained loss": Case(plain, three, TrainedLoss),
    "output not asked for": Case(plain, three, arguments={"return_output": False}),
}


def of_lengths(*lengths: int) -> Callable[[], list[Batch]]:
    return lambda: [batch(5, length, length, 6) for length in lengths]


def asking() -> list[Batch]:
    return [(x.requires_grad_(), y) for x, y in three()]


def misaligned() -> list[Batch]:
    """The same look, and another place in memory: kernels may then give other bits."""
    whole, y = batch(14, dtype=torch.float32)
    flat = torch.cat([whole.flatten(), torch.zeros(3)])
    return [(flat[start : start + 78].view(13, 6), y[:13]) for start in (0, 1, 3)]


class ShowsStart(nn.Module):
    """Adds where its input starts in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.data_ptr() % 64 / 4


def showing_start() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), nn.Identity(), ShowsStart(), linear())


def checkpointing() -> nn.Sequential:
    """Recomputes by itself, with dropout inside."""
    torch.manual_seed(0)
    return nn.Sequential(*(NestedCheckpoint() for _ in range(4)))


BATCHES: dict[str, Case] = {
    "batch sizes": Case(plain, partial(batches, 1, 3, 5, 8, 1, 8), options={"chunks": 4}),
    "sequence lengths": Case(plain, of_lengths(4, 7, 3, 4, 7)),
    "fewer micro-batches than stages": Case(plain, three, options={"chunks": 2}),
    "one micro-batch": Case(plain, three, options={"chunks": 1}),
    "gradients add up": Case(plain, lambda: three()[:1] * 2, accumulates=True),
    "asking for gradients": Case(plain, asking),
    "cut elsewhere": Case(
        plain, lambda: [batch(3, seed, 7, 6) for seed in range(2)], options={"split": 1}
    ),
}


def frozen_first() -> nn.Sequential:
    module = plain()
    module[0].requires_grad_(False)
    module[2].requires_grad_(False)
    return module


def frozen_between() -> nn.Sequential:
    module = plain()
    module[4].requires_grad_(False)
    return module


def tokens() -> list[Batch]:
    return [(torch.arange(13) * step % 7, batch(13, step)[1]) for step in (1, 2, 3)]


class Spare(nn.Linear):
    """Has a parameter that its forward leaves out."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.spare = nn.Parameter(torch.ones(2))


def image(x: Tensor) -> Tensor:
    return x.reshape(-1, 2, 3, 1).to(memory_format=torch.channels_last)


LAYERS: dict[str, Case] = {
    "frozen first layers": Case(frozen_first, three),
    "frozen layer between": Case(frozen_between, three),
    "tokens": Case(seeded(partial(nn.Embedding, 7, 6), nn.Tanh, linear, nn.Tanh, linear), tokens),
    "in place at first": Case(
        seeded(partial(nn.ReLU, inplace=True), linear, nn.Tanh, linear), asking
    ),
    "in place in each stage": Case(
        seeded(*[linear, partial(nn.Tanh), linear, partial(nn.ReLU, inplace=True)] * 2), three
    ),
    "parameter without gradient": Case(seeded(Spare, nn.Tanh, linear, Spare), three),
    "channels last": Case(
        lambda: nn.Sequential(
            Do(lambda w, x: image(w * x)),
            seeded(partial(nn.Conv2d, 2, 2, 1))()[0],
            nn.Tanh(),
            Do(lambda w, x: w * x.reshape(-1, 6)),
        ),
        three,
    ),
    "transposed on both ways": Case(
        seeded(linear, nn.Tanh, Across, nn.Tanh, Across, partial(nn.Linear, 6, 4)),
        lambda: [(batch(9, seed, 2, 6)[0], batch(9, seed, 2, 4)[1]) for seed in range(3)],
    ),
    "checkpoint inside": Case(
        checkpointing,
        lambda: [batch(13, seed, 4, dtype=torch.float32) for seed in range(3)],
    ),
    "autocast": Case(
        lambda: mlp(),
        three_floats,
        around=partial(torch.autocast, "cpu", torch.bfloat16),
    ),
    # A stage that passes a slice on without a copy: its start changed, and the other end did not
    # know.
    "places in memory": Case(showing_start, misaligned),
    "batch norm": Case(drawing, three_floats),
    "deferred batch norm": Case(drawing, three_floats, options={"deferred_batch_norm": True}),
}


def with_skips(num_layers: int, *spans: tuple[int, int]) -> nn.Sequential:
    """Layers of which some leave something and others meet it; each span has a namespace."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [linear() for _ in range(num_layers)]
    for first, last in spans:
        namespace = Namespace()
        for place, end in ((first, Leave()), (last, Meet())):
            end.isolate(namespace)
            layers[place] = end
    return nn.Sequential(*layers).double()


def skipping(*spans: tuple[int, int]) -> Case:
    return Case(partial(with_skips, 8, *spans), three)


# Eight layers, two a stage.
SKIPS: dict[str, Case] = {
    "skip to the next stage": skipping((1, 2)),
    "far skip": skipping((1, 7)),
    "skip inside a stage": skipping((2, 3)),
    "skip inside a worker": skipping((1, 5)),
    "several skips": skipping((0, 6), (1, 2), (3, 5)),
    "skips side by side": skipping((0, 4), (1, 5)),
    "skip without gradient": Case(lambda: _frozen(with_skips(8, (1, 6)), 0), three),
    "skip of the input": Case(partial(with_skips, 8, (0, 7)), asking),
    "skip whose gradient is None": Case(
        lambda: _replaced(with_skips(8, (1, 6)), 7, Do(lambda w, x: w * x)), three
    ),
}


def _frozen(module: nn.Sequential, *places: int) -> nn.Sequential:
    for place in places:
        module[place].requires_grad_(False)
    return module


def _replaced(module: nn.Sequential, place: int, layer: nn.Module) -> nn.Sequential:
    module[place] = layer
    return module


class Tied(nn.Module):
    """Projects with the weight of another layer."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def with_ties(places: tuple[int, ...], dtype: torch.dtype, frozen: bool = False) -> nn.Sequential:
    """Eight layers, two a stage; those at the places share a weight."""
    module = mlp(8)
    weight = module[places[0]].weight.requires_grad_(not frozen)
    for place in places[1:]:
        module[place] = Tied(weight)
    return module.to(dtype)


def tying(*places: int, frozen: bool = False) -> Case:
    return Case(partial(with_ties, places, torch.float64, frozen), three)


def embedding_and_head() -> nn.Sequential:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, linear(), nn.Tanh(), linear(), head).double()


def next_tokens() -> list[Batch]:
    return [(x, x.flip(0)) for x, _ in tokens()]


TIES: dict[str, Case] = {
    "tie of neighbours": tying(0, 2),
    "tie of the ends": tying(0, 7),
    "three tied": tying(0, 3, 5),  # in stages 0, 1, 2: of two workers the first, second, first
    "four tied": tying(0, 1, 5, 7),
    "tie inside a worker": tying(0, 5),
    "tie inside a stage": tying(2, 3),
    "frozen tie": tying(0, 7, frozen=True),
    "tie in float32": Case(partial(with_ties, (0, 3, 5, 7), torch.float32), three_floats),
    "embedding and head": Case(
        embedding_and_head,
        next_tokens,
        nn.CrossEntropyLoss,
    ),
}


CASES = LOSSES | BATCHES | LAYERS | SKIPS | TIES | VALUES | ENDS
