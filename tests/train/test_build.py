"""Whatever a run file names is found, and fits, before anything starts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpipe.data import Splits
from gpipe.errors import ConfigError
from gpipe.train.build import Run, build
from gpipe.train.config import LrScheduleConfig, RunConfig
from gpipe.train.lr_schedule import lr_factor

FACTORIES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from gpipe.data import Splits

NUMBER = 7

def linear(width, *, bias=True):
    return nn.Sequential(nn.Linear(width, 2, bias=bias))

def anything(**sizes):
    return nn.Sequential(nn.Linear(64, 10))

def lone_layer():
    return nn.Linear(64, 10)

class Residual(nn.Sequential):
    def forward(self, input):
        return input + super().forward(input)

def residual():
    return Residual(nn.Linear(64, 64))

def faulty():
    raise ValueError("a bug of the user")

def no_splits():
    return [1, 2]

def no_rows():
    empty = TensorDataset(torch.zeros(0, 64))
    return Splits(empty, empty)

def loss(output, target):
    return output.sum(), len(target)

class Nothing:
    pass
"""


@pytest.fixture(autouse=True)
def _factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_own.py").write_text(FACTORIES)
    (tmp_path / "users_broken.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(tmp_path)


def config(**changes: Any) -> RunConfig:
    content: dict[str, Any] = {
        "name": "short",
        "model": {"factory": "gpipe.models:mlp", "sizes": [64, 16, 10]},
        "data": {"factory": "gpipe.data:digits", "batch_size": 64},
        "loss": "cross_entropy",
        "pipeline": {"stages": 2, "chunks": 4},
        "optimizer": {"name": "SGD", "lr": 0.1},
    }
    return RunConfig.model_validate(content | changes)


def refused(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(config(**changes))
    return str(caught.value)


def model(factory: str, **arguments: Any) -> dict[str, Any]:
    return {"model": {"factory": factory, **arguments}}


def data(factory: str, **arguments: Any) -> dict[str, Any]:
    return {"data": {"factory": factory, "batch_size": 64, **arguments}}


def test_everything_is_made() -> None:
    run = build(config())

    assert isinstance(run, Run)
    assert list(run.model.balance) == [2, 1]
    assert isinstance(run.splits, Splits)
    assert isinstance(run.loss.function, nn.CrossEntropyLoss)
    assert isinstance(run.optimizer, torch.optim.SGD)
    assert run.optimizer.param_groups[0]["lr"] == 0.1
    assert run.model.training


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = build(config()).model.state_dict()
    torch.manual_seed(2)
    again = build(config(data={"factory": "gpipe.data:digits", "batch_size": 8})).model.state_dict()
    other = build(config(seed=1)).model.state_dict()

    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])


def test_the_number_of_stages_is_filled_in() -> None:
    assert build(config(pipeline={"balance": [1, 2]})).config.pipeline.stages == 2


def test_all_names_that_cannot_be_found_are_told_at_once() -> None:
    told = refused(
        **model("gpipe.models:mpl"),
        **data("gpipe.dta:digits"),
        loss="gpipe.losses:own",
        optimizer={"name": "adamw2"},
    )

    assert told.splitlines() == [
        "4 mistakes in the run file:",
        "  model.factory: the module `gpipe.models` has no `mpl`. Did you mean `mlp`?",
        "  data.factory: there is no module `gpipe.dta`."
        " Install it, or start gpipe in the folder that holds it.",
        "  loss: there is no module `gpipe.losses`."
        " Install it, or start gpipe in the folder that holds it.",
        told.splitlines()[4],
    ]
    assert 'optimizer.name: "adamw2" is no optimizer for this loop. Did you mean `AdamW`?' in told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (model("users_own:NUMBER"), '"users_own:NUMBER" is of type int. Name something to call.'),
        (model("users_own:lone_layer"), "users_own:lone_layer returns a Linear. Return an nn.Seq"),
        (
            model("users_own:linear", widht=3),
            "model.widht: linear has no argument `widht` (value 3). Did you mean `width`?"
            " It takes width, bias.",
        ),
        (model("users_own:linear"), "model.width: is missing: linear needs it."),
        (model("users_own:lone_layer", size=1), "It takes none."),
        (model("gpipe.models:mlp", sizes=[64]), "model: sizes is [64]. Give at least two widths"),
        (model("gpipe.models:mlp", sizes="64"), "model: sizes is '64'. Give a list of whole"),
        (model("gpipe.models:mlp", sizes=[4, 2], activation="rleu"), "activation is 'rleu'"),
        (data("gpipe.data:digits", batchsize=3), "data.batchsize: digits has no argument"),
        (data("gpipe.data:digits", batchsize=3), "Did you mean `batch_size`?"),
        (data("gpipe.data:digits", test_fraction=2.0), "data: test_fraction is 2.0"),
        (data("users_own:no_splits"), "data.factory: users_own:no_splits returns a list."),
        (data("users_own:no_rows"), "users_own:no_rows returns no rows in `train`."),
        ({"loss": "users_own:Nothing"}, "makes a Nothing, which cannot be called with"),
        ({"loss": "users_own:NUMBER"}, "loss: "),
        ({"loss_reduction": "weighted"}, 'loss_reduction: "weighted" is for a loss of your own'),
        (
            {"loss": "torch.nn:MSELoss", "loss_reduction": "sum"},
            "loss_reduction: loss_fn.reduction is 'mean' and loss_reduction is 'sum'",
        ),
        ({"optimizer": {"name": "LBFGS"}}, '"LBFGS" is no optimizer for this loop.'),
        (
            {"optimizer": {"name": "SGD", "learning_rate": 0.1}},
            "optimizer.learning_rate: SGD has no argument `learning_rate` (value 0.1).",
        ),
        ({"optimizer": {"name": "SGD", "params": 3}}, "SGD has no argument `params`"),
        (
            {"optimizer": {"name": "SGD", "lr": -1.0}},
            "optimizer: SGD refuses its arguments: Invalid learning rate: -1.0",
        ),
        ({"optimizer": {"name": "AdamW", "lr": "fast"}}, "optimizer: AdamW refuses its arguments"),
    ],
)
def test_what_does_not_fit_is_told(changes: dict[str, Any], told: str) -> None:
    assert told in refused(**changes)


class TestPipeline:
    def test_a_balance_of_another_sum_is_told_with_both_numbers(self) -> None:
        told = refused(pipeline={"balance": [3, 3]})

        assert "pipeline.balance: " in told
        assert "6" in told
        assert "3" in told.partition("pipeline.balance")[2].replace("[3, 3]", "")

    def test_more_stages_than_layers_are_told_with_both_numbers(self) -> None:
        told = refused(pipeline={"stages": 4})

        assert "pipeline.stages: " in told
        assert "4" in told
        assert "3" in told

    def test_a_model_that_cannot_be_cut_is_told(self) -> None:
        assert "model.factory: " in refused(**model("users_own:residual"), pipeline={"stages": 1})


class TestFactory:
    def test_keyword_arguments_of_any_name_are_passed_on(self) -> None:
        run = build(config(**model("users_own:anything", width=3), pipeline={"stages": 1}))

        assert len(run.model) == 1

    def test_a_bug_of_the_user_keeps_its_class_and_gets_a_note(self) -> None:
        with pytest.raises(ValueError, match="a bug of the user") as caught:
            build(config(**model("users_own:faulty")))

        assert not isinstance(caught.value, ConfigError)
        assert "`model.factory`, users_own:faulty" in caught.value.__notes__[0]

    def test_a_module_that_cannot_import_what_it_needs_says_so_itself(self) -> None:
        with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
            build(config(**model("users_broken:model")))


class TestLoss:
    def test_a_class_is_made(self) -> None:
        loss = build(config(loss="torch.nn:MSELoss")).loss

        assert isinstance(loss.function, nn.MSELoss)

    def test_a_named_loss_adds_up_when_asked(self) -> None:
        loss = build(config(loss="mse", loss_reduction="sum")).loss

        assert loss.function(torch.ones(2), torch.zeros(2)) == 2

    def test_sums_and_weights_of_mini_batches_make_the_loss_over_all_rows(self) -> None:
        """Cross-entropy with ignored targets, the rows in two unequal parts (CASES 3)."""
        loss = build(config()).loss
        logits = torch.tensor([[2.0, 0], [0, 0], [0, 0], [0, 0]])
        targets = torch.tensor([0, -100, 1, 1])
        parts = [slice(0, 1), slice(1, 2), slice(2, 4)]

        totals = [loss.total(logits[part], targets[part], 1) for part in parts]

        mean = sum(total for total, _ in totals) / sum(weight for _, weight in totals)
        assert mean == pytest.approx(0.504407, abs=1e-6)

    def test_the_mean_counts_rows(self) -> None:
        loss = build(config(loss="mse")).loss

        assert loss.total(torch.full((3, 2), 2.0), torch.zeros(3, 2), 3) == (12.0, 3)

    def test_a_loss_of_the_user_may_weigh_itself(self) -> None:
        loss = build(config(loss="users_own:loss", loss_reduction="weighted")).loss

        assert loss.total(torch.ones(4), torch.ones(4), 4) == (4.0, 4.0)


class TestLrSchedule:
    @pytest.mark.parametrize(
        ("name", "factors"),
        [
            ("constant", [0.5, 1, 1, 1, 1, 1]),
            ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
            ("cosine", [0.5, 1, 1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
        ],
    )
    def test_warm_up_then_the_course(self, name: Any, factors: list[float]) -> None:
        schedule = LrScheduleConfig(name=name, warmup_steps=2)

        assert [lr_factor(schedule, step, 6) for step in range(6)] == pytest.approx(factors)

    @pytest.mark.parametrize("name", ["linear", "cosine"])
    def test_the_course_ends_at_zero_and_stays_there(self, name: Any) -> None:
        schedule = LrScheduleConfig(name=name)

        assert [lr_factor(schedule, step, 4) for step in (4, 9)] == pytest.approx([0, 0])

    def test_a_run_shorter_than_its_warm_up_only_warms_up(self) -> None:
        schedule = LrScheduleConfig(name="cosine", warmup_steps=10)

        assert [lr_factor(schedule, step, 2) for step in range(2)] == pytest.approx([0.1, 0.2])
