"""What a run file says of stages and devices, and what contradicts it."""

import re
from pathlib import Path

import pytest

from gpipe.plan import search
from gpipe.train import costing, planning
from tests.train.planned import enter, said


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(tmp_path, monkeypatch)


# One of them was left out of account in each command.
@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        (["pipeline.devices=[cpu, cpu, cpu]", "pipeline.stages=3"], 3),
        (["plan.devices=3"], 3),
        (["plan.devices=1"], 1),
        ([], 2),
    ],
)
def test_a_search_uses_the_devices_that_there_are(capsys, monkeypatch, overrides, most):
    tried = []

    def noted(*args: object, **kwargs: object) -> object:
        tried.append(max(args[1].num_devices))
        return search(*args, **kwargs)

    monkeypatch.setattr(planning, "search", noted)
    said(capsys, "plan", "run.yaml", "--search", "--set", "plan.flops=1e9", *overrides)
    assert tried == [most]


def test_a_plan_uses_the_devices_that_there_are(capsys):
    text = said(
        capsys, "plan", "run.yaml", "--set", "plan.flops=1e9", "plan.devices=2",
        "pipeline.stages=4", "pipeline.schedule=interleaved_1f1b",
    )  # fmt: skip
    assert text.startswith("4 stages [2, 1, 1, 1] on 2 devices")
    text = said(
        capsys, "plan", "run.yaml", "--set", "plan.flops=1e9", "plan.devices=3",
        "pipeline.stages=null",
    )  # fmt: skip
    assert re.match(r"3 stages \S+ \S+ \S+ on 3 devices", text)


@pytest.mark.parametrize("more", [[], ["--search"]])
def test_devices_that_contradict_each_other_are_told_with_both_keys(capsys, more):
    told = said(
        capsys, "plan", "run.yaml", *more, "--set", "plan.flops=1e9", "plan.devices=3",
        "pipeline.devices=[cpu, cpu]", code=2,
    )  # fmt: skip
    assert "plan.devices: is 3, and pipeline.devices lists 2. Leave one of them out" in told


def test_more_stages_than_devices_are_told(capsys):
    told = said(
        capsys, "plan", "run.yaml", "--set", "plan.flops=1e9", "plan.devices=2",
        "pipeline.stages=3", code=2,
    )  # fmt: skip
    assert "plan.devices: is 2, and the run has 3 workers" in told


@pytest.mark.parametrize(
    ("command", "overrides"),
    [
        ("plan", ["pipeline.stages=9"]),
        ("plan", ["pipeline.balance=[2, 2]"]),
        ("plan", ["pipeline.devices=[cpu]"]),
        ("plan", ["pipeline.devices=[cpu, nowhere]"]),
        ("balance", ["pipeline.stages=9"]),
        ("plan", ["pipeline.stages=5", "pipeline.schedule=interleaved_1f1b", "plan.devices=2"]),
    ],
)
def test_what_is_refused_is_refused_before_anything_is_measured(
    capsys, monkeypatch, command, overrides
):
    monkeypatch.setattr(costing, "profile", None)
    monkeypatch.setattr(costing, "profile_meta", None)
    assert "pipeline" in said(capsys, command, "run.yaml", "--set", *overrides, code=2)


@pytest.mark.parametrize(
    ("overrides", "present", "absent"),
    [
        (["pipeline.checkpoint=always"], ["raise pipeline.chunks from 4 to 32"], ["checkpoint:"]),
        (["pipeline.chunks=32"], ["checkpoint: always"], ["raise pipeline.chunks"]),
        (["pipeline.stages=5"], ["lower data.batch_size"], ["more stages"]),
        (["data.batch_size=1"], ["more stages"], ["batch_size", "chunks"]),
    ],
)
def test_remedies_are_those_that_change_something(capsys, overrides, present, absent):
    arguments = ["plan", "run.yaml", "--set", "plan.flops=1e9", "plan.memory=1 KiB", *overrides]
    told = said(capsys, *arguments, code=1)
    assert all(each in told for each in present)
    assert not any(each in told for each in absent)


def test_one_stage_is_no_stages(capsys):
    text = said(
        capsys, "plan", "run.yaml", "--set", "plan.flops=1e9", "pipeline.stages=1",
        "pipeline.chunks=1",
    )  # fmt: skip
    assert text.startswith("1 stage [5] on 1 device, 32 rows in 1 micro-batch,")
