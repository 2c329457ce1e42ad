"""Every run file that is shipped is valid, and runs."""

import json
import re
from pathlib import Path

import pytest

from gpipe.cli import main
from gpipe.train.config import load

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def train(path: Path, folder: Path, *overrides: str) -> int:
    return main(["train", str(path), "--set", f"output_dir={folder}", *overrides])


def test_there_are_some() -> None:
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_is_named_after_its_file(path: Path) -> None:
    assert load(path).name == path.stem


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path) -> None:
    assert train(path, tmp_path, "train.epochs=1") == 0

    lines = (tmp_path / path.stem / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["kind"] == "evaluation"


@pytest.mark.slow
def test_the_digits_are_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(ROOT / "configs" / "digits_mlp_4stages.yaml", tmp_path) == 0

    accuracy = re.search(r"test accuracy ([\d.]+)%", capsys.readouterr().out.splitlines()[-1])
    assert accuracy is not None
    assert float(accuracy[1]) >= 97
