import pytest
import torch
from torch import nn

from gpipe.models import mlp


def kinds(model: nn.Sequential) -> list[str]:
    return [type(layer).__name__ for layer in model]


def test_every_layer_is_a_child_of_its_own() -> None:
    model = mlp([64, 32, 16, 10])

    assert kinds(model) == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert model(torch.zeros(3, 64)).shape == (3, 10)


def test_two_sizes_are_one_linear_layer() -> None:
    assert kinds(mlp([4, 2])) == ["Linear"]


def test_dropout_follows_each_activation() -> None:
    model = mlp([4, 3, 2], activation="tanh", dropout=0.5)

    assert kinds(model) == ["Linear", "Tanh", "Dropout", "Linear"]


@pytest.mark.parametrize("sizes", [[], [64], [64, 0, 10], [64, -1]])
def test_refuses_sizes_that_make_no_model(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"sizes is .*at least two widths, each 1 or more"):
        mlp(sizes)


@pytest.mark.parametrize("sizes", [64, "64", [64, "10"], [64, True], [64.0, 10], None])
def test_refuses_sizes_that_are_no_whole_numbers(sizes: object) -> None:
    with pytest.raises(TypeError, match=r"sizes is .*list of whole numbers"):
        mlp(sizes)  # type: ignore[arg-type]


def test_refuses_an_unknown_activation() -> None:
    with pytest.raises(ValueError, match=r"activation is 'rleu'. Choose one of relu, tanh"):
        mlp([4, 2], activation="rleu")


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_refuses_a_dropout_that_is_no_probability(dropout: float) -> None:
    with pytest.raises(ValueError, match="dropout is"):
        mlp([4, 2], dropout=dropout)


def test_refuses_a_dropout_that_is_no_number() -> None:
    with pytest.raises(TypeError, match="dropout is 'half'"):
        mlp([4, 2], dropout="half")  # type: ignore[arg-type]
