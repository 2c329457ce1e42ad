"""What an optimizer keeps, and what it refuses."""

import pytest

from gpipe.train.mistake import RunFileError
from gpipe.train.optimizer import state_share
from tests.train.planned import config


@pytest.mark.parametrize(
    ("optimizer", "share"),
    [
        ({"name": "SGD", "lr": 0.1}, 0),
        ({"name": "SGD", "lr": 0.1, "momentum": 0.9}, 1),
        ({"name": "AdamW"}, 2),
        ({"name": "RMSprop"}, 1),
    ],
)
def test_what_an_optimizer_keeps_is_seen(optimizer, share):
    assert state_share(config(optimizer=optimizer).optimizer) == share


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "AdamW", "capturable": True},
        {"name": "Adadelta", "capturable": True},
        {"name": "SparseAdam"},
    ],
)
def test_an_optimizer_that_is_particular_is_seen_all_the_same(optimizer):
    assert state_share(config(optimizer=optimizer).optimizer) == 2


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"name": "AdamW", "differentiable": True}, "AdamW fails in its first step with"),
        ({"name": "AdamW", "betas": [0.9]}, "AdamW refuses its arguments: list index"),
    ],
)
def test_an_optimizer_that_fails_is_told(optimizer, message):
    with pytest.raises(RunFileError, match=f"optimizer: {message}"):
        state_share(config(optimizer=optimizer).optimizer)
