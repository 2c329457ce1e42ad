"""The command line: exit codes, messages, nothing left behind by a mistake."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gpipe
from gpipe.cli import main

RUN_FILE = """
name: short
model: {factory: "gpipe.models:mlp", sizes: [64, 16, 10]}
data: {factory: "gpipe.data:digits", batch_size: 256}
loss: cross_entropy
pipeline: {stages: 2, chunks: 4}
optimizer: {name: AdamW}
"""

USERS_OWN = """
import torch
from torch import nn

class Faulty(nn.Module):
    def forward(self, input):
        raise RuntimeError("a fault of the layer")

def lone_layer():
    return nn.Linear(64, 10)

def faulty():
    return nn.Sequential(nn.Linear(64, 10), Faulty())
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is a user in a folder with a run file and a module."""
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    (tmp_path / "users_model.py").write_text(USERS_OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def started(*arguments: str) -> "subprocess.Popen[str]":
    """The command as a process that hears Ctrl-C, wherever the tests themselves run."""
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from gpipe.cli import main; sys.exit(main())"
    )
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def test_a_run_ends_with_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.yaml", "--set", "train.epochs=2", "name=other"]) == 0

    assert "test accuracy" in capsys.readouterr().out.splitlines()[-1]
    assert {path.name for path in Path("runs/other").iterdir()} == {"config.yaml", "metrics.jsonl"}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("pipeline.balance=[1, 1]", "pipeline.balance: "),
        ("pipeline.balance=[3, 0]", "pipeline.balance: [3, 0] is not allowed. Give"),
        ("pipeline.balance=[4, -1]", "pipeline.balance: [4, -1] is not allowed. Give"),
        ("pipeline.stages=9", "pipeline.stages: "),
        ("pipeline.chunks=0", "pipeline.chunks: 0 is not allowed. Give a whole number, 1 or more"),
        ("pipeline.chunks=four", 'pipeline.chunks: "four" is not allowed. Give a whole number'),
        (
            "pipeline.schedule=1f1bb",
            "Give fill_drain, 1f1b, interleaved_1f1b or looped_breadth_first. Did you mean `1f1b`?",
        ),
        ("trainig.epochs=1", 'trainig: is no key (value {"epochs": 1}). Did you mean `train`?'),
        ("train.num-epochs=1", "train.num-epochs: is no key (value 1). Did you mean `epochs`?"),
        ("model={factory: 'users_model:lone_layer'}", "returns a Linear. Return an nn.Sequential."),
        ("model.sizes=[64]", "model: sizes is [64]. Give at least two widths"),
        ("model.factory=nowhere:model", "model.factory: there is no module `nowhere`."),
        ("optimizer.name=Adamm", "Did you mean `Adam`?"),
        ("nonsense", "--set nonsense: write it as key.path=value"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_left(
    capsys: pytest.CaptureFixture[str], override: str, told: str
) -> None:
    """CASES 32: exit 2 before anything starts, with the path, the nearest key, the legal values."""
    assert main(["train", "run.yaml", "--set", override]) == 2

    printed = capsys.readouterr()
    assert told in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert not Path("runs").exists()


def test_a_missing_file_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "none.yaml"]) == 2
    assert "There is no file none.yaml." in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["trian", "run.yaml"], ["train"], ["train", "--sett"]])
def test_a_wrong_command_is_told(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    assert "usage: gpipe" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out == f"gpipe {gpipe.__version__}\n"


def test_a_mistake_leaves_no_traceback_of_the_process() -> None:
    process = started("train", "run.yaml", "--set", "pipeline.chunks=four")
    out, err = process.communicate(timeout=60)

    assert (process.returncode, out) == (2, "")
    assert err.startswith("gpipe: 1 mistake in run.yaml:")
    assert "Traceback" not in err


def test_an_exception_of_the_users_code_keeps_its_traceback() -> None:
    process = started("train", "run.yaml", "--set", "model={factory: 'users_model:faulty'}")
    _, err = process.communicate(timeout=60)

    assert process.returncode == 1
    assert "Traceback" in err
    assert 'raise RuntimeError("a fault of the layer")' in err
    assert "stage 1" in err


def test_ctrl_c_ends_a_run_with_its_files_intact() -> None:
    process = started("train", "run.yaml", "--set", "train.epochs=100000")
    metrics = Path("runs/short/metrics.jsonl")
    deadline_s = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size > 1000):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "Traceback" not in err
    assert "What was recorded is in runs/short." in err
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "step"] == list(
        range(1, records[-1]["step"] + 1)
    )
