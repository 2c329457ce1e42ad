"""Odd values of every key, and no traceback."""

from pathlib import Path

import pytest

from tests.train.planned import enter, said


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(tmp_path, monkeypatch)


# These were found by trying odd values of every key: tracebacks, and times without end.
@pytest.mark.parametrize("command", [["plan"], ["plan", "--search"], ["train"]])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.flops=1e-308", "plan.flops: 1e-308 is not allowed. Give a number from 1 to 1e30"),
        ("plan.flops=1e31", "plan.flops: 1e+31 is not allowed"),
        ("plan.bandwidth=1e-300", "plan.bandwidth: 1e-300 is not allowed. Give bytes a second"),
        ("plan.bandwidth=fast", 'plan.bandwidth: "fast" is not allowed. Give bytes a second over'),
        ("plan.memory=1e300 GiB", 'plan.memory: "1e300 GiB" is not allowed. Give bytes that'),
        ("plan.latency_s=1e300", "plan.latency_s: 1e+300 is not allowed. Give seconds"),
        ("plan.devices=0", "plan.devices: 0 is not allowed. Give a whole number, 1 or more"),
        (f"pipeline.chunks={10**30}", "Give a whole number, 1 or more, up to 65536"),
        (f"data.batch_size={10**30}", "Give a whole number, 1 or more, up to 10^15"),
        (f"optimizer.weight_decay={10**400}", "optimizer.weight_decay: 1000"),
        ("optimizer.lr=.inf", "optimizer.lr: Infinity is not allowed"),
        ("optimizer.betas=[0.9]", "optimizer: AdamW refuses its arguments: list index"),
        ("optimizer.differentiable=true", "optimizer: AdamW fails in its first step with"),
        ("name=2001-99-99", "has a value that YAML reads as a date or a number, and cannot"),
        ("model.factory='.:x'", 'model.factory: "." is relative. Name the module in full'),
    ],
)
def test_odd_values_are_told(capsys, command, override, message):
    assert message in said(capsys, command[0], "run.yaml", *command[1:], "--set", override, code=2)


def test_an_optimizer_that_cannot_step_here_is_told_before_a_run(capsys):
    told = said(capsys, "train", "run.yaml", "--set", "optimizer.capturable=true", code=2)
    assert "optimizer: AdamW fails in its first step with" in told
    assert not Path("runs").exists()
