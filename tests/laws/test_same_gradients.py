"""Law 1: the gradients of the plain model, whatever the batch."""

from itertools import product

import pytest
import torch
from torch import nn

from gpipe import GPipe
from tests.members import (
    CHECKPOINT_MODES,
    FACES,
    SCHEDULES,
    mlp,
    relative_difference,
    take_gradients,
    train_once,
)

BATCH_SIZES = (1, 3, 8, 10)


def batch(num_rows: int, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
    return x, torch.randn(num_rows, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 7])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "loss_fn", [nn.MSELoss(), nn.MSELoss(reduction="sum")], ids=["mean", "sum"]
)
def test_gradients_equal_those_of_the_plain_model(num_stages, num_microbatches, loss_fn):
    module = mlp().double()
    for schedule, checkpoint in product(SCHEDULES, CHECKPOINT_MODES):
        model = GPipe(
            module, num_stages, num_microbatches, schedule=schedule, checkpoint=checkpoint
        )
        for face, num_rows in product(FACES, BATCH_SIZES):
            x, y = batch(num_rows)
            plain_loss = loss_fn(module(x), y)
            plain_loss.backward()
            plain = take_gradients(module)

            if face == "step":
                loss = model.step(x, y, loss_fn, loss_reduction=loss_fn.reduction).loss
            else:
                loss = train_once(model, face, x, y, loss_fn)

            piped = take_gradients(model)
            assert relative_difference(loss, plain_loss) <= 1e-12
            assert piped.keys() == plain.keys()
            for name, gradient in plain.items():
                assert relative_difference(piped[name], gradient) <= 1e-12, (name, schedule, face)
