"""Models that take no micro-batch of one row."""

from pathlib import Path

import pytest
from torch import nn

from tests.train.planned import enter, said


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(tmp_path, monkeypatch)


def normed(width: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, 10))


# Batch normalisation raised a traceback, or ways were proposed in which it would have.
@pytest.mark.parametrize("chunks", [4, 32])
@pytest.mark.parametrize("known", [["plan.flops=1e9"], []])
def test_a_search_leaves_out_rows_that_are_too_few(capsys, chunks, known):
    overrides = [f"model={{factory: '{__name__}:normed'}}", f"pipeline.chunks={chunks}", *known]
    text = said(capsys, "plan", "run.yaml", "--search", "--set", *overrides)
    assert "Micro-batches of 1 row are left out, which the model refuses: Expected more" in text
    assert "BatchNorm1d" in text
    assert "chunks 32" not in text
    assert "chunks: 32" not in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.chunks=32"], "pipeline.chunks: is 32, which cuts 32 rows into micro-batches"),
        (["pipeline.chunks=17"], "Lower it to 16 at most"),
        (["data.batch_size=1"], "data.batch_size: is 1"),
    ],
)
def test_a_plan_of_rows_that_are_too_few_is_refused(capsys, overrides, message):
    model = f"model={{factory: '{__name__}:normed'}}"
    assert message in said(capsys, "plan", "run.yaml", "--set", model, *overrides, code=2)
