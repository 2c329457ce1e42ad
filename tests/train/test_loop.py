"""A training run from end to end: what it computes, keeps and says."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from gpipe.data import Splits, digits
from gpipe.errors import ConfigError
from gpipe.models import mlp
from gpipe.train.batches import in_order, shuffled
from gpipe.train.build import real
from gpipe.train.config import RunConfig, load
from gpipe.train.evaluation import evaluate
from gpipe.train.loop import Result, train
from gpipe.train.loss import Loss

DIGITS = "gpipe.data:digits"
NUM_ROWS = 1438


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Bits depend on the number of intra-op threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def config(folder: Path, **changes: Any) -> RunConfig:
    """Two stages, 256 rows a mini-batch: six steps an epoch, the last one with 158 rows."""
    content: dict[str, Any] = {
        "name": "short",
        "model": {"factory": "gpipe.models:mlp", "sizes": [64, 32, 32, 10]},
        "data": {"factory": DIGITS, "batch_size": 256},
        "loss": "cross_entropy",
        "pipeline": {"stages": 2, "chunks": 4},
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "lr_schedule": {"name": "cosine", "warmup_steps": 3},
        "train": {"epochs": 2, "clip_grad_norm": 1.0},
        "output_dir": str(folder),
    }
    return RunConfig.model_validate(content | changes)


def records(result: Result, kind: str) -> list[dict[str, Any]]:
    lines = (result.directory / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def weights(result: Result) -> list[torch.Tensor]:
    return list(result.run.model.state_dict().values())


def equal(first: Result, second: Result) -> bool:
    return all(map(torch.equal, weights(first), weights(second)))


class TestMetrics:
    def test_every_step_is_recorded(self, folder: Path) -> None:
        steps = records(train(config(folder)), "step")

        assert [record["step"] for record in steps] == list(range(1, 13))
        assert [record["epoch"] for record in steps] == [1] * 6 + [2] * 6
        assert [record["rows"] for record in steps] == ([256] * 5 + [158]) * 2
        assert all(record["rows_per_s"] > 0 and record["makespan_s"] > 0 for record in steps)
        assert all(0 <= record["bubble"] < 1 for record in steps)

    def test_the_learning_rate_is_that_of_the_step(self, folder: Path) -> None:
        steps = records(train(config(folder)), "step")

        last = 0.005 * (1 + math.cos(math.pi * 8 / 9))
        assert [steps[step]["lr"] for step in (0, 1, 2, 3, 11)] == pytest.approx(
            [0.01 / 3, 0.02 / 3, 0.01, 0.01, last]
        )

    def test_every_epoch_is_evaluated(self, folder: Path) -> None:
        result = train(config(folder))
        first, last = records(result, "evaluation")

        assert (first["step"], last["step"], last["epoch"]) == (6, 12, 2)
        assert last["test_accuracy"] == result.evaluation.accuracy
        assert last["test_accuracy"] > first["test_accuracy"]
        assert last["test_loss"] < first["test_loss"]

    def test_targets_that_are_no_classes_have_no_accuracy(self, folder: Path) -> None:
        result = train(
            config(
                folder,
                data={"factory": f"{__name__}:sines", "batch_size": 20},
                model={"factory": "gpipe.models:mlp", "sizes": [1, 8, 1]},
                loss="mse",
            )
        )

        assert result.evaluation.accuracy is None
        assert "test_accuracy" not in records(result, "evaluation")[0]


class TestExactness:
    def test_the_loss_shown_is_that_of_the_whole_mini_batch(self, folder: Path) -> None:
        """Not the last micro-batch's (CASES 33); the last mini-batch is short and uneven."""
        result = train(config(folder, train={"epochs": 1, "clip_grad_norm": 1.0}))

        losses, _ = train_plainly(num_epochs=1)
        assert [record["loss"] for record in records(result, "step")] == pytest.approx(
            losses, rel=1e-5
        )

    @pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
    def test_weights_are_those_of_a_plain_loop(self, folder: Path, schedule: str) -> None:
        pipeline = {"stages": 3, "chunks": 4, "schedule": schedule}
        result = train(config(folder, pipeline=pipeline))

        _, model = train_plainly(num_epochs=2)
        for mine, plain in zip(weights(result), model.state_dict().values(), strict=True):
            assert torch.allclose(mine, plain, rtol=0, atol=1e-5)

    def test_a_repeated_run_is_bitwise_the_same(self, folder: Path) -> None:
        first = train(config(folder))
        torch.manual_seed(99)  # what was drawn before a run does not matter

        assert equal(first, train(config(folder)))

    @pytest.mark.parametrize(
        "pipeline",
        [
            {"stages": 1, "chunks": 4},
            {"balance": [1, 2, 2], "chunks": 4, "checkpoint": "never"},
            {"stages": 4, "chunks": 4, "checkpoint": "always"},
        ],
    )
    def test_the_cut_does_not_matter(self, folder: Path, pipeline: dict[str, Any]) -> None:
        """Shuffling, gradients, clipping: the same bits for any number of stages."""
        assert equal(train(config(folder)), train(config(folder, pipeline=pipeline)))

    def test_bf16_computes_in_bf16(self, folder: Path) -> None:
        full = train(config(folder))
        half = train(config(folder, train={"epochs": 2, "precision": "bf16"}))

        assert not equal(full, half)
        assert all(weight.dtype == torch.float32 for weight in weights(half))
        assert half.evaluation.accuracy == pytest.approx(full.evaluation.accuracy, abs=0.1)


class TestRunDirectory:
    def test_it_is_named_after_the_run_and_then_numbered(self, folder: Path) -> None:
        short = {"train": {"epochs": 1}}
        names = [train(config(folder, **short)).directory.name for _ in range(3)]

        assert names == ["short", "short-2", "short-3"]
        assert sorted(path.name for path in folder.iterdir()) == names

    def test_its_configuration_is_a_run_file_for_the_same_run(self, folder: Path) -> None:
        first = train(config(folder))
        again = train(load(first.directory / "config.yaml"))

        assert again.run.config == first.run.config
        assert equal(first, again)

    def test_none_is_made_where_something_is_wrong(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match=r"pipeline\.balance"):
            train(config(folder, pipeline={"balance": [9, 9]}))

        assert not folder.exists()

    def test_one_that_cannot_be_made_is_told(self, folder: Path) -> None:
        folder.write_text("a file stands here")

        with pytest.raises(ConfigError, match="output_dir: no run directory can be made"):
            train(config(folder))


class TestTerminal:
    def test_the_final_line_says_accuracy_throughput_and_bubble(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        train(config(folder))
        printed = capsys.readouterr()

        last = printed.out.splitlines()[-1]
        for word in ("test accuracy ", " rows/s, bubble ", "% measured", "20.0% by the formula"):
            assert word in last
        assert "(K-1)/(M+K-1) with K=2, M=4" in last
        assert "epoch 2/2" in printed.err
        assert re.search(r"1438/1438 .*rows/s, loss \d\.\d{4}", printed.err)

    @pytest.mark.parametrize(
        ("stages", "chunks", "warning"),
        [
            (2, 1, "expect a bubble of 50%: a mini-batch makes 1 micro-batch(es) for 2 stages"),
            (3, 2, "expect a bubble of 50%: a mini-batch makes 2 micro-batch(es) for 3 stages"),
        ],
    )
    def test_too_few_micro_batches_are_warned_of(
        self,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
        stages: int,
        chunks: int,
        warning: str,
    ) -> None:
        """CASES 34: chunks=1, or fewer micro-batches than stages."""
        pipeline = {"stages": stages, "chunks": chunks}
        train(config(folder, pipeline=pipeline, train={"epochs": 1}))

        assert f"warning: {warning}" in capsys.readouterr().err

    def test_fewer_rows_than_chunks_are_warned_of(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        few = {"factory": f"{__name__}:few_rows", "batch_size": 2}
        train(config(folder, data=few, pipeline={"stages": 3, "chunks": 8}))

        assert "makes 2 micro-batch(es) for 3 stages" in capsys.readouterr().err

    @pytest.mark.parametrize("pipeline", [{"stages": 2, "chunks": 2}, {"stages": 1, "chunks": 1}])
    def test_enough_micro_batches_are_not(
        self, folder: Path, capsys: pytest.CaptureFixture[str], pipeline: dict[str, int]
    ) -> None:
        train(config(folder, pipeline=pipeline, train={"epochs": 1}))

        assert "warning" not in capsys.readouterr().err

    def test_an_interrupted_run_says_where_it_stopped(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(KeyboardInterrupt):
            train(config(folder, data={"factory": f"{__name__}:interrupting", "batch_size": 100}))

        told = f"stopped after step 3. What was recorded is in {folder / 'short'}."
        assert told in capsys.readouterr().err
        lines = (folder / "short" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
        assert load(folder / "short" / "config.yaml").name == "short"


class TestBatches:
    rows = TensorDataset(torch.arange(10), torch.arange(10))

    def order(self, seed: int, epoch: int) -> list[int]:
        batches = shuffled(self.rows, 4, seed=seed, epoch=epoch)
        return torch.cat([batch.input for batch in batches]).tolist()

    def test_every_row_comes_once(self) -> None:
        batches = list(shuffled(self.rows, 4, seed=0, epoch=1))

        assert [batch.num_rows for batch in batches] == [4, 4, 2]
        assert [len(batch.target) for batch in batches] == [4, 4, 2]
        assert sorted(self.order(0, 1)) == list(range(10))

    def test_the_order_is_a_function_of_seed_and_epoch(self) -> None:
        first = self.order(0, 1)
        torch.manual_seed(5)

        assert self.order(0, 1) == first
        assert len({tuple(self.order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4

    def test_nothing_is_drawn_from_the_global_generator(self) -> None:
        before = torch.get_rng_state()
        self.order(0, 1)
        list(in_order(self.rows, 4))

        assert torch.equal(torch.get_rng_state(), before)


class TestEvaluation:
    def test_every_row_counts_the_same(self) -> None:
        """Three rows in mini-batches of two: the lone last one must not count double."""
        rows = TensorDataset(torch.tensor([[1.0], [2.0], [6.0]]), torch.zeros(3, 1))

        found = evaluate(nn.Identity(), Loss(nn.MSELoss(), "mean"), rows, 2)

        assert found.loss == pytest.approx((1 + 4 + 36) / 3)

    def test_ignored_targets_are_neither_hit_nor_missed(self) -> None:
        logits = torch.tensor([[2.0, 0], [0, 1], [0, 1], [1, 0]])
        rows = TensorDataset(logits, torch.tensor([0, -100, 1, 1]))

        found = evaluate(nn.Identity(), Loss(nn.CrossEntropyLoss(), "mean"), rows, 4)

        assert found.accuracy == pytest.approx(2 / 3)

    def test_the_mode_is_put_back(self) -> None:
        model = nn.Dropout(0.5)
        rows = TensorDataset(torch.ones(4, 2), torch.ones(4, 2))

        assert evaluate(model, Loss(nn.MSELoss(), "mean"), rows, 2).loss == 0
        assert model.training


def train_plainly(num_epochs: int) -> tuple[list[float], nn.Module]:
    """The loop that everyone writes, for the un-cut model; the losses of its steps."""
    with torch.device("meta"):
        model = mlp([64, 32, 32, 10])
    real(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss()
    rows, losses, num_steps = digits().train, [], 6 * num_epochs
    for epoch in range(1, num_epochs + 1):
        for input, target, _ in shuffled(rows, 256, seed=0, epoch=epoch):
            step = len(losses)
            warm = 0.5 * (1 + math.cos(math.pi * (step - 3) / (num_steps - 3)))
            optimizer.param_groups[0]["lr"] = 0.01 * ((step + 1) / 3 if step < 3 else warm)
            optimizer.zero_grad()
            loss = loss_fn(model(input), target)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return losses, model


def sines() -> Splits:
    inputs = torch.linspace(0, 3, 50)[:, None]
    rows = TensorDataset(inputs, inputs.sin())
    return Splits(rows, rows)


def few_rows() -> Splits:
    rows = TensorDataset(torch.zeros(4, 64), torch.zeros(4, dtype=torch.int64))
    return Splits(rows, rows)


class _Interrupting(Dataset[tuple[torch.Tensor, ...]]):
    """Stands for a user who presses Ctrl-C while the fourth mini-batch is loaded."""

    def __init__(self) -> None:
        self.num_loaded = 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, row: int) -> tuple[torch.Tensor, ...]:
        self.num_loaded += 1
        if self.num_loaded > 350:
            raise KeyboardInterrupt
        return torch.zeros(64), torch.tensor(0)


def interrupting() -> Splits:
    rows = _Interrupting()
    return Splits(rows, rows)
