import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe import GPipe
from gpipe.models import transformer
from gpipe.models.transformer import sinusoids
from gpipe.profiling import profile_meta

GIB = 2**30
BYTES_PER_PARAMETER = 12  # weight, gradient and the accumulator of RMSProp


def printed(count: float) -> str:
    """A number of parameters with the digits that the paper prints."""
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


@pytest.mark.parametrize(
    ("num_blocks", "parameters", "parameter_gib"),
    [
        (3, "282.2 M", 3.15),  # table 1 prints the two cells of Naive-1 swapped
        (13, "785.8 M", 8.8),
        (103, "5.3 B", 59.5),
        (415, "21.0 B", 235.1),
        (1663, "83.9 B", 937.9),
    ],
)
def test_the_parameters_of_the_paper(num_blocks, parameters, parameter_gib):
    with torch.device("meta"):
        module = transformer(num_blocks, 2048, 16, 32000, hidden=8192)
        sample = torch.zeros(32, 1024, dtype=torch.int64)
    costs = profile_meta(module, sample)
    count = sum(costs.parameter_bytes) / 4
    assert printed(count) == parameters
    assert count * BYTES_PER_PARAMETER / GIB == pytest.approx(parameter_gib, rel=0.003)
    assert costs.gradient_bytes == costs.parameter_bytes


def test_the_formula_of_parameters():
    d, h, vocabulary, num_blocks = 24, 40, 50, 3
    module = transformer(num_blocks, d, 4, vocabulary, h)
    count = sum(parameter.numel() for parameter in module.parameters())
    block = 4 * d**2 + 2 * d * h + 9 * d + h
    assert count == 2 * vocabulary * d + vocabulary + num_blocks * block
    assert len(module) == num_blocks + 2


def test_from_tokens_to_logits():
    module = transformer(2, 24, 4, 50)
    assert module(torch.zeros(3, 7, dtype=torch.int64)).shape == (3, 7, 50)


def test_a_token_sees_itself_and_earlier_ones_only():
    torch.manual_seed(0)
    module = transformer(3, 24, 4, 50).eval()
    tokens = torch.randint(50, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 50
    before, after = module(tokens), module(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5])
    assert not torch.allclose(before[:, 7], after[:, 7])


def test_the_same_tokens_at_other_places_give_something_else():
    torch.manual_seed(0)
    logits = transformer(1, 24, 4, 50).eval()(torch.full((1, 6), 3))
    assert not torch.allclose(logits[0, 0], logits[0, 5])


@pytest.mark.parametrize("width", [6, 7])
def test_positions_are_sines_and_cosines(width):
    found = sinusoids(torch.zeros(2, 5, width))
    for place in range(5):
        for channel in range(width):
            angle = place / 10000 ** (channel // 2 * 2 / width)
            wave = math.cos if channel % 2 else math.sin
            assert found[place, channel] == pytest.approx(wave(angle), abs=1e-6)


def test_dropout_is_for_training():
    torch.manual_seed(0)
    module, tokens = transformer(1, 24, 4, 50, dropout=0.5), torch.zeros(2, 6, dtype=torch.int64)
    assert not torch.equal(module(tokens), module(tokens))
    module.eval()
    assert torch.equal(module(tokens), module(tokens))


def test_it_learns_in_a_pipeline():
    torch.manual_seed(0)
    model = GPipe(transformer(2, 32, 4, 10), [2, 2], chunks=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    counting = (torch.arange(9) + torch.arange(8)[:, None]) % 10
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(model.step(counting[:, :-1], counting[:, 1:], next_token_loss).loss.item())
        optimizer.step()
    assert losses[0] == pytest.approx(math.log(10), rel=0.5)
    assert losses[-1] < losses[0] / 4


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_every_kind_of_layer_is_a_child():
    kinds = [type(layer).__name__ for layer in transformer(2, 24, 4, 50)]
    assert kinds == ["TokenEmbedding", "Block", "Block", "Projection"]
    assert isinstance(transformer(1, 24, 4, 50), nn.Sequential)


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        ({"num_blocks": 0}, ValueError, "`num_blocks` is 0"),
        ({"vocabulary": 2.5}, TypeError, "`vocabulary` is 2.5"),
        ({"num_heads": 5}, ValueError, "width is 24 and num_heads is 5. Let width be a multiple"),
        ({"hidden": 0}, ValueError, "`hidden` is 0"),
        ({"dropout": 1.0}, ValueError, "dropout is 1.0"),
        ({"dropout": "half"}, TypeError, "dropout is 'half'"),
    ],
)
def test_refuses_what_makes_no_model(wrong, error, told):
    arguments = {"num_blocks": 1, "width": 24, "num_heads": 4, "vocabulary": 50} | wrong
    with pytest.raises(error, match=told):
        transformer(**arguments)
