import sys

import pytest
import torch
from torch.utils.data import TensorDataset

from gpipe.data import digits
from gpipe.errors import ConfigError


def tensors(rows: object) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(rows, TensorDataset)
    inputs, targets = rows.tensors
    return inputs, targets


def test_four_fifths_of_1797_images_are_trained_on() -> None:
    splits = digits()
    (train_inputs, train_targets), (test_inputs, _) = tensors(splits.train), tensors(splits.test)

    assert (len(train_inputs), len(test_inputs)) == (1438, 359)
    assert train_inputs.shape[1:] == (64,)
    assert (train_inputs.dtype, train_targets.dtype) == (torch.float32, torch.int64)
    assert (train_inputs.min(), train_inputs.max()) == (0, 1)
    assert train_targets.unique().tolist() == list(range(10))


def test_every_image_is_in_one_part_only() -> None:
    splits = digits(test_fraction=0.5)
    rows = torch.cat([tensors(splits.train)[0], tensors(splits.test)[0]])

    # All images of the set differ from each other.
    assert len(rows.unique(dim=0)) == 1797


def test_the_split_is_a_function_of_its_seed() -> None:
    torch.manual_seed(1)
    first = tensors(digits().test)[0]
    torch.manual_seed(2)
    again = tensors(digits().test)[0]
    other = tensors(digits(split_seed=1).test)[0]

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    digits()

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("test_fraction", [0, 1, -0.5, 2.0, 1e-6, "a fifth", float("nan")])
def test_refuses_an_empty_part(test_fraction: object) -> None:
    with pytest.raises(ValueError, match=r"test_fraction is .* does not cut 1797 rows in two"):
        digits(test_fraction)  # type: ignore[arg-type]


@pytest.mark.parametrize("split_seed", [-1, 0.5, "one", None])
def test_refuses_a_seed_that_is_none(split_seed: object) -> None:
    with pytest.raises(ValueError, match=r"split_seed is .* whole number"):
        digits(split_seed=split_seed)  # type: ignore[arg-type]


def test_tells_how_to_get_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)

    with pytest.raises(ConfigError, match=r'scikit-learn.*pip install "gpipe\[examples\]"'):
        digits()
