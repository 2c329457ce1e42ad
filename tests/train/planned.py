"""A run file in a folder, and what `gpipe` says of it."""

from pathlib import Path

import pytest

from gpipe.cli import main
from gpipe.train.config import RunConfig

__all__ = ["config", "enter", "said"]

RUN_FILE = """
name: short
model: {factory: "gpipe.models:mlp", sizes: [64, 32, 16, 10]}
data: {factory: "gpipe.data:digits", batch_size: 32}
loss: cross_entropy
pipeline: {stages: 2, chunks: 4}
optimizer: {name: AdamW}
"""


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a user in a folder with a run file."""
    (folder / "run.yaml").write_text(RUN_FILE)
    monkeypatch.chdir(folder)


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out if code == 0 else err


def config(**sections: object) -> RunConfig:
    content = {
        "name": "short",
        "model": {"factory": "gpipe.models:mlp", "sizes": [64, 32, 16, 10]},
        "data": {"factory": "gpipe.data:digits", "batch_size": 32},
        "loss": "cross_entropy",
        "optimizer": {"name": "AdamW"},
    }
    return RunConfig.model_validate(content | sections)
