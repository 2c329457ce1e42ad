"""`gpipe schedule show` and `gpipe schedule check`."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpipe.cli import main
from gpipe.schedule import one_f_one_b, save_schedule

DEADLOCK = "worker 0  F0.0 B0.0 F0.1 B0.1\nworker 1  F1.0 F1.1 B1.1 B1.0\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_schedule(one_f_one_b(2, 2), "good.txt")
    save_schedule(one_f_one_b(2, 2), "good.csv")
    Path("deadlock.txt").write_text(DEADLOCK)
    Path("bad.txt").write_text("worker 0  F0.0 X0.0\n")


@pytest.mark.parametrize("file", ["good.txt", "good.csv"])
def test_show_draws_it(capsys: pytest.CaptureFixture[str], file: str) -> None:
    assert main(["schedule", "show", file]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "2 stages on 2 workers, 2 micro-batches.",
        "worker 0  F0.0 F0.1  .   B0.0  .   B0.1",
        "worker 1   .   F1.0 B1.0 F1.1 B1.1  .",
        "6 slots; the bubble is 33.3% where every action takes one slot.",
        "Micro-batches held at most, by worker: 2, 1.",
    ]


def test_show_draws_also_what_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "show", "deadlock.txt"]) == 0

    assert "6 actions can never run; `check` says why." in capsys.readouterr().out


@pytest.mark.parametrize("file", ["good.txt", "good.csv"])
def test_check_says_that_it_is_good(capsys: pytest.CaptureFixture[str], file: str) -> None:
    assert main(["schedule", "check", file]) == 0

    assert capsys.readouterr().out == (
        f"{file} is complete, in order and free of deadlock. "
        "Its workers hold at most 2, 1 micro-batches.\n"
    )


@pytest.mark.parametrize(
    ("command", "file", "told"),
    [
        ("check", "deadlock.txt", "gpipe: The schedule (2 stages, 2 micro-batches) deadlocks.\n"),
        ("check", "bad.txt", "gpipe: bad.txt: 'X0.0' in line 1 is no action."),
        ("show", "bad.txt", "gpipe: bad.txt: 'X0.0' in line 1 is no action."),
        ("check", "none.txt", "gpipe: There is no file none.txt. Check the path.\n"),
        ("show", ".", "gpipe: . cannot be read: "),
    ],
)
def test_a_mistake_is_told(
    capsys: pytest.CaptureFixture[str], command: str, file: str, told: str
) -> None:
    assert main(["schedule", command, file]) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(told)


@pytest.mark.parametrize("arguments", [[], ["draw", "good.txt"], ["show"], ["check", "a", "b"]])
def test_a_wrong_command_is_told(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["schedule", *arguments])

    assert ended.value.code == 2
    assert "usage: gpipe" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "check"])
def test_it_answers_without_torch(command: str) -> None:
    program = (
        "import sys; from gpipe.cli import main; "
        f"code = main(['schedule', '{command}', 'good.txt']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
