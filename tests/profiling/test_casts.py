"""The copies of weights that autocast makes and keeps."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe import GPipe
from gpipe.costs import Size
from gpipe.profiling import profile_memory
from gpipe.schedule import one_f_one_b
from gpipe.simulate import simulate
from tests.profiling.cast_bytes import peak_cast_bytes
from tests.profiling.held_bytes import peak_bytes
from tests.profiling.members import over_all_ways


def bf16(**options: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **options)


def model() -> nn.Sequential:
    """What is cast and kept, what is frozen, what is not cast, what is of another type."""
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.Linear(8, 6, bias=False).requires_grad_(False),
        nn.LayerNorm(6),
        nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)),
        nn.Linear(6, 6).to(torch.bfloat16),
    )


@over_all_ways
def test_what_the_cache_keeps_is_counted_by_layer(measure):
    with bf16():
        costs = measure(model(), torch.rand(8, 6))
    assert costs.cast_bytes == (2 * (48 + 8), 0, 0, 2 * (36 + 6), 0)


@over_all_ways
def test_without_autocast_nothing_is_cast(measure):
    assert measure(model()[:4], torch.rand(8, 6)).cast_bytes == (0, 0, 0, 0)


@over_all_ways
def test_without_a_cache_each_micro_batch_saves_its_own_copies(measure):
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with bf16():
        with_cache = measure(module, torch.rand(8, 6))
    with bf16(cache_enabled=False):
        without = measure(module, torch.rand(8, 6))
    assert with_cache.cast_bytes == (84, 84)
    assert without.cast_bytes == (0, 0)
    assert with_cache.memory.saved_sizes[1] == Size(0, 12)
    assert without.memory.saved_sizes[1] == Size(72, 12)  # a copy of the weight


def test_a_profile_leaves_no_copies_in_the_callers_cache():
    copies = []

    class Keeps(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default:
                reference = torch.multiprocessing.reductions.StorageWeakRef
                copies.append(reference(output.untyped_storage()))
            return output

    with bf16():
        with Keeps():
            profile_memory(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.rand(8, 6))
        assert copies
        assert all(copy.expired() for copy in copies)


@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain"])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_step_holds_what_is_predicted(schedule, mode):
    module = nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 16)
    )
    x, y = torch.randn(24, 16), torch.randn(24, 16)
    with bf16():
        costs = profile_memory(module, x[:4], target=y[:4], loss_fn=functional.mse_loss)
        pipe = GPipe(module, [2, 2, 1], 6, schedule=schedule, checkpoint=mode)
        found = peak_cast_bytes(pipe, partial(pipe.step, x, y, functional.mse_loss))
    casts = costs.cast_bytes
    assert found == [casts[0], casts[2], casts[4]]
    assert found == [2 * (512 + 32), 2 * (512 + 16), 2 * (256 + 16)]


def test_activations_and_copies_are_held_together():
    layers = [[nn.Linear(16, 16, bias=False), nn.Tanh()] for _ in range(4)]
    module = nn.Sequential(*(each for pair in layers for each in pair))
    # Where the input needs a gradient, autograd saves each weight, and the count sees its copy.
    x, y = torch.randn(24, 16, requires_grad=True), torch.randn(24, 16)
    with bf16():
        costs = profile_memory(module, x[:4], target=y[:4], loss_fn=functional.l1_loss)
        pipe = GPipe(module, [4, 4], 6, checkpoint="never")
        found = peak_bytes(pipe, partial(pipe.step, x, y, functional.l1_loss), [y])
    activations = simulate(one_f_one_b(2, 6), costs.stage_costs([4, 4], 4)).peak_bytes
    casts = sum(costs.cast_bytes[:4]), sum(costs.cast_bytes[4:])
    assert casts == (2 * 2 * 256, 2 * 2 * 256)
    expected = [sum(pair) for pair in zip(activations, casts, strict=True)]
    assert found == pytest.approx(expected, rel=0.005)
