"""Law 2: the same bits for one (schedule, M), whatever cuts and recomputes there are."""

from itertools import product

import pytest
import torch
from torch import nn

from gpipe import GPipe
from tests.members import FACES, SCHEDULES, intra_op_threads, mlp, train_once

NUM_STEPS = 20
NUM_MICROBATCHES = 5


def final_weights(num_stages: int, checkpoint: str, schedule: str, face: str) -> list[torch.Tensor]:
    model = GPipe(mlp(), num_stages, NUM_MICROBATCHES, schedule=schedule, checkpoint=checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        train_once(model, face, *batch(step), nn.MSELoss())
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def plain_weights() -> list[torch.Tensor]:
    module = mlp()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        x, y = batch(step)
        nn.MSELoss()(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in module.parameters()]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=generator), torch.randn(12, 6, generator=generator)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("face", FACES)
def test_final_weights_are_the_same_to_the_last_bit(schedule, face):
    with intra_op_threads(1):
        reference = final_weights(1, "never", schedule, face)
        # (1, "never") once more is the repeated run.
        for num_stages, checkpoint in product((1, 2, 4), ("never", "except_last", "always")):
            weights = final_weights(num_stages, checkpoint, schedule, face)
            for mine, other in zip(weights, reference, strict=True):
                assert torch.equal(mine, other), (num_stages, checkpoint)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("face", FACES)
def test_final_weights_are_close_to_those_of_a_plain_loop(schedule, face):
    weights = final_weights(4, "always", schedule, face)
    for mine, plain in zip(weights, plain_weights(), strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=1e-5)
