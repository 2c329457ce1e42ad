"""A run of several processes: what is refused before they meet, and what one process has."""

import shlex
from pathlib import Path

import pytest
import torch

from gpipe.cli import main
from gpipe.train.batches import Batch
from gpipe.train.team import Team, is_one_of_many

RUN_FILE = """
name: short
model: {factory: "gpipe.models:mlp", sizes: [64, 16, 10]}
data: {factory: "gpipe.data:digits", batch_size: 256}
loss: cross_entropy
pipeline: {stages: 2, chunks: 4}
optimizer: {name: AdamW}
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def one_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts it; it need not find the others, of which there are none."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")


@pytest.mark.usefixtures("one_of_three")
@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "pipeline.replicas=2",
            "pipeline.replicas: is 2, and there are 3 processes, which cannot be shared out to so"
            " many. Start a multiple of it.",
        ),
        (
            "pipeline.devices=[cpu, cpu]",
            "pipeline.devices: lists devices, and each of several processes has that of its local"
            " rank. Leave it out, or start one process.",
        ),
        ("pipeline.replicas=0", "pipeline.replicas: 0 is not allowed. Give a whole number, 1 or"),
        ("pipeline.all_reduce=rings", "Give backend, ring or none: how gradients of replicas are"),
        ("pipeline.watchdog_s=0", "pipeline.watchdog_s: 0 is not allowed. Give seconds, more than"),
        ("pipeline.processes=2", "pipeline.processes: 2 is not allowed. Give true:"),
    ],
)
def test_a_mistake_is_told_before_anybody_is_waited_for(
    capsys: pytest.CaptureFixture[str], override: str, told: str
) -> None:
    assert main(["train", "run.yaml", "--set", override]) == 2

    printed = capsys.readouterr()
    assert told in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert not list(Path().glob("*runs"))


@pytest.mark.parametrize(
    ("overrides", "num_processes"),
    [
        ([], 2),
        (["pipeline.replicas=3"], 6),
        (["pipeline.stages=null", "pipeline.balance=[1, 1, 1]"], 3),
        (["pipeline.stages=null"], None),
    ],
)
def test_a_single_process_prints_the_line_that_starts_all(
    capsys: pytest.CaptureFixture[str], overrides: list[str], num_processes: int | None
) -> None:
    words = [
        "train",
        "run.yaml",
        "--set",
        "output_dir=my runs",
        "pipeline.processes=true",
        *overrides,
    ]
    assert main(words) == 2

    printed = capsys.readouterr()
    line = shlex.split(printed.err.splitlines()[-1])
    if num_processes is not None:  # else it is that of the accelerators, or one
        assert line[1] == f"--nproc-per-node={num_processes}"
    assert [line[0], *line[2:]] == ["torchrun", "-m", "gpipe", *words]
    assert not list(Path().glob("*runs"))


def test_a_process_is_one_of_many_if_it_was_told_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "RANK", "WORLD_SIZE":
        monkeypatch.delenv(name, raising=False)
    assert not is_one_of_many()
    monkeypatch.setenv("RANK", "0")
    assert not is_one_of_many()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert is_one_of_many()


def test_a_process_alone_has_everything_and_speaks() -> None:
    team = Team()
    batch = Batch(torch.arange(3), torch.arange(3), 3)
    assert team.is_main
    assert team.num_workers is None
    assert team.told("a") == "a"
    assert team.every("a") == ["a"]
    assert team.part(batch) is batch
