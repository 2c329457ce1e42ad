"""Law 3: what the caller's generator notices of a mini-batch."""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe import GPipe
from gpipe.errors import GpipeError
from tests.laws.drawing import (
    CHUNKS,
    NUM_ROWS,
    Call,
    Scale,
    build,
    inner_checkpoint,
    inputs,
    over_faces,
    same,
    train,
)
from tests.members import CHECKPOINT_MODES, intra_op_threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with intra_op_threads(1):
        yield


def after_one_number(state: Tensor) -> list[Tensor]:
    """The generator's state after one draw, of 32 or of 64 bits."""
    states = []
    for limit in (2, 2**62):
        generator = torch.Generator()
        generator.set_state(state)
        torch.randint(limit, (), generator=generator)
        states.append(generator.get_state())
    return states


# The caller's own random numbers must not hang on how the model is cut: a shuffled epoch would
# change with K. So there is exactly one draw a mini-batch, whatever happens inside.
@pytest.mark.parametrize("name", ["Dropout", "rand_like", "reentrant checkpoint inside"])
@over_faces
def test_the_caller_pays_one_number_per_mini_batch(face, schedule, name):
    ends = []
    for num_stages, checkpoint, chunks in product((1, 3), CHECKPOINT_MODES, (1, 4)):
        model = build(name, num_stages, checkpoint, schedule)
        model.chunks = chunks
        torch.manual_seed(5)
        for _ in range(3):
            before = torch.get_rng_state()
            train(model, face, inputs(name))
            state = torch.get_rng_state()
            assert any(torch.equal(state, after) for after in after_one_number(before))
        ends.append(state)
    assert all(torch.equal(end, ends[0]) for end in ends)


QUIET: dict[str, Callable[[], nn.Module]] = {
    "nothing": lambda: nn.Linear(8, 8),
    "dropout of nothing": lambda: nn.Dropout(0.0),
    "dropout switched off": lambda: Call(lambda x: functional.dropout(x, 0.5, training=False)),
    "a checkpoint": lambda: Call(inner_checkpoint(False), nn.Linear(8, 8)),
    "a generator of its own": lambda: Call(
        lambda x: x * torch.rand(8, generator=torch.Generator().manual_seed(3))
    ),
    "a fork that seeds itself": lambda: Call(seeded_noise),
}


def seeded_noise(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return x * torch.rand_like(x)


@pytest.mark.parametrize("name", QUIET)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@over_faces
def test_the_callers_generator_is_untouched_where_nothing_draws(face, schedule, checkpoint, name):
    torch.manual_seed(5)
    module = nn.Sequential(Scale(), QUIET[name](), Scale(), QUIET[name]())
    model = GPipe(module, 3, CHUNKS, schedule=schedule, checkpoint=checkpoint)
    before = torch.get_rng_state()
    for _ in range(3):
        train(model, face, torch.ones(NUM_ROWS, 8))
        model.eval()(torch.ones(3, 8))
        model.train()
        assert torch.equal(torch.get_rng_state(), before)


class StartsLater(nn.Module):
    """Draws from its second mini-batch on."""

    draws = False

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, training=self.draws)


# Only layers that drew in the first mini-batch are given random numbers of their own: one that
# starts later would draw from the caller's, in the order of the threads. The mini-batch in which it
# does is refused, and the next one knows.
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("num_stages", [1, 3])
@over_faces
def test_a_layer_that_starts_to_draw_later(face, schedule, num_stages, checkpoint):
    def build(draws: bool) -> GPipe:
        layers = [Scale(), StartsLater(), Scale()]
        layers[1].draws = draws
        return GPipe(
            nn.Sequential(*layers), num_stages, 2, schedule=schedule, checkpoint=checkpoint
        )

    x = torch.ones(4, 8)
    late = build(draws=False)
    for _ in range(3):
        train(late, face, x)
    late[1].draws = True
    for parameter in late.parameters():
        parameter.grad = torch.tensor(7.0)
    with pytest.raises((RuntimeError, GpipeError), match=r"(?i)random|draw"):
        train(late, face, x, seed=5)
    assert [parameter.grad.item() for parameter in late.parameters()] == [7.0, 7.0]

    late.zero_grad()
    early = build(draws=True)
    for seed in (5, 6):
        assert same(train(late, face, x, seed), train(early, face, x, seed))
