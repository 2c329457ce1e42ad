"""The ways to profile, and models with all that makes profiling hard."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpipe import pop, skippable, stash
from gpipe.profiling import WorkspaceWarning, profile, profile_memory, profile_meta


def quick_profile(module, sample, **options):
    """The real thing, with one repeat of each layer."""
    return profile(module, sample, **{"time_budget_s": 0.0} | options)


def quiet_profile_meta(module, sample, **options):
    """The real thing, which warns of layers whose workspace it does not see."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkspaceWarning)
        return profile_meta(module, sample, **options)


over_all_ways = pytest.mark.parametrize(
    "measure", [quick_profile, profile_memory, quiet_profile_meta], ids=["time", "memory", "meta"]
)


class Restless(nn.Module):
    """Changes everything that a layer can reach while it runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("nothing", None)
        self.calls, self.cache, self.by_name = 0, [], {}

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        self.weight.data.add_(1)
        self.count += 1
        self.count.data.add_(1)
        self.nothing = torch.ones(())
        self.calls += 1
        self.cache.append(input)
        self.by_name["input"] = input
        self.last = input
        self.train(not self.training)
        noise = random.random() + float(np.random.rand()) + torch.rand(())
        return input * self.weight + noise


class Recurrent(nn.LSTM):
    """Keeps its weights in a list besides; takes its rows for a sequence."""

    def forward(self, input: Tensor) -> Tensor:
        output, _ = super().forward(input)
        return output


def restless_model(width: int = 6) -> nn.Sequential:
    """Norms, dropout, in-place layers, renormalised embeddings, frozen layers, and `Restless`."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(10, width, max_norm=0.5),
        nn.BatchNorm1d(width),
        nn.ReLU(inplace=True),
        nn.Linear(width, width).requires_grad_(False),
        nn.Dropout(0.5),
        Restless(width),
        Recurrent(width, width),
        nn.utils.parametrizations.spectral_norm(nn.Linear(width, width)),
        nn.BatchNorm1d(width).eval(),
        nn.Linear(width, 3),
    )


class Fails(nn.Module):
    """Raises, forward or backward."""

    def __init__(self, in_backward: bool) -> None:
        super().__init__()
        self.in_backward = in_backward

    def forward(self, input: Tensor) -> Tensor:
        torch.rand(())
        if not self.in_backward:
            raise KeyError("mine")
        output = input.clone()
        output.register_hook(self.fail)
        return output

    def fail(self, gradient: Tensor) -> None:
        raise KeyError("mine")


class Nested(nn.Module):
    """From a tensor to a nesting with a tuple, a mask, None and a number."""

    def forward(self, input: Tensor) -> dict[str, object]:
        return {"value": input.exp(), "mask": input > 0, "none": None, "pair": (input, 3)}


class Flat(nn.Module):
    """From that nesting to a tensor."""

    def forward(self, nested: dict[str, object]) -> Tensor:
        assert nested["none"] is None
        return nested["value"] * nested["mask"] + nested["pair"][0] * nested["pair"][1]


@skippable(stash=["early", "nothing"])
class Stashes(nn.Module):
    """Stashes its input, and None."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, input: Tensor):
        yield stash("early", input)
        yield stash("nothing", None)
        return self.linear(input).tanh()


@skippable(pop=["early", "nothing"])
class Pops(nn.Module):
    """Multiplies by what was stashed."""

    def forward(self, input: Tensor):
        early = yield pop("early")
        nothing = yield pop("nothing")
        assert nothing is None
        return input * early
