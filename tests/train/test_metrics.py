import json
from pathlib import Path

import pytest

from gpipe.train.metrics import MetricsFile


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.write("step", 1, 1, loss=0.5, rows=64)
        assert records(path) == [{"kind": "step", "step": 1, "epoch": 1, "loss": 0.5, "rows": 64}]

        metrics.write("evaluation", 1, 1, test_loss=0.25)
        assert records(path)[1] == {"kind": "evaluation", "step": 1, "epoch": 1, "test_loss": 0.25}


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        metrics.write("evaluation", 1, 1, test_loss=0.25, test_accuracy=None)

    assert "test_accuracy" not in records(tmp_path / "metrics.jsonl")[0]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_null(tmp_path: Path, number: float) -> None:
    """`NaN` is no JSON: a strict reader would give up on the whole file."""
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        metrics.write("step", 1, 1, loss=number)

    assert '"loss": null' in (tmp_path / "metrics.jsonl").read_text()


def test_the_records_of_another_run_are_never_overwritten(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "metrics.jsonl").close()

    with pytest.raises(FileExistsError):
        MetricsFile(tmp_path / "metrics.jsonl")
