"""`gpipe plan` and `gpipe balance`, from a run file to the line that is pasted into it."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe.cli import main
from gpipe.costs import LayerCosts
from gpipe.partition import balance_costs
from gpipe.profiling import profile
from gpipe.train import costing
from gpipe.train.build import build
from gpipe.train.config import BALANCED_BY
from tests.train.planned import config, enter, said

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(tmp_path, monkeypatch)


def test_a_plan_tells_time_and_the_memory_of_each_stage(capsys):
    text = said(capsys, "plan", "run.yaml", "--set", "plan.flops=1e9")
    assert text.startswith("2 stages [2, 3] on 2 devices, 32 rows in 4 micro-batches, 1f1b")
    assert re.search(r"step [\d.]+ s, .* rows/s, bubble [\d.]+%", text)
    weights = (64 * 32 + 32) * 4
    assert f"{weights / 1024:.1f} KiB" in text
    assert f"{2 * weights / 1024:.1f} KiB" in text  # what AdamW keeps


def test_counted_layers_are_not_allocated_nor_run(capsys, monkeypatch):
    monkeypatch.setattr(costing, "profile", None)
    said(capsys, "plan", "run.yaml", "--set", "plan.flops=1e9")


def test_measured_layers_come_from_a_file_the_second_time(capsys, monkeypatch):
    first = said(capsys, "plan", "run.yaml", "--profile", "costs.json")
    costs = LayerCosts.load("costs.json")
    assert all(time_s > 0 for time_s in costs.forward_s)
    monkeypatch.setattr(costing, "profile", None)
    assert said(capsys, "plan", "run.yaml", "--profile", "costs.json") == first


def test_a_profile_of_another_model_is_refused(capsys):
    said(capsys, "plan", "run.yaml", "--set", "plan.flops=1e9", "--profile", "costs.json")
    told = said(
        capsys, "plan", "run.yaml", "--profile", "costs.json", "--set", "plan.flops=1e9",
        "model.sizes=[64, 512, 16, 10]", code=2,
    )  # fmt: skip
    assert "it is another model's" in told
    Path("costs.json").write_text("{}")
    told = said(capsys, "plan", "run.yaml", "--profile", "costs.json", code=2)
    assert "costs.json is no file of layer costs" in told


def test_a_counted_profile_takes_the_speed_that_is_asked_for(capsys):
    def step(*flops: str, code: int = 0) -> str:
        return said(
            capsys, "plan", "run.yaml", "--profile", "costs.json", "--search", *flops, code=code
        )

    slow, fast = (step("--set", f"plan.flops={flops}") for flops in ("1e9", "1e12"))
    assert slow != fast
    assert "The costs have no times" in step(code=1)


def test_devices_are_counted(capsys):
    told = said(
        capsys, "plan", "run.yaml", "--set", "plan.flops=1e9", "pipeline.devices=[cpu, cpu, cpu]",
        code=2,
    )  # fmt: skip
    assert "lists 3 devices for 2 workers" in told


def test_what_does_not_fit_is_told_after_the_table_with_both_numbers(capsys):
    assert main(["plan", "run.yaml", "--set", "plan.flops=1e9", "plan.memory=20 KiB"]) == 1
    out, err = capsys.readouterr()
    assert "too much" in out
    assert re.search(r"Device \d needs [\d.]+ KiB and has 20.0 KiB\. See what fits", err)


def test_a_search_shows_the_best_and_why_others_lose(capsys):
    text = said(capsys, "plan", "run.yaml", "--search", "--set", "plan.flops=1e9")
    assert text.startswith("1. ")
    assert "Next, and why they lose:" in text
    pasted = text.strip().splitlines()[-1]
    assert re.fullmatch(
        r"pipeline: \{balance: \[[\d, ]+\], chunks: \d+, schedule: \w+, checkpoint: \w+\}", pasted
    )


def test_a_search_where_nothing_fits_is_an_error(capsys):
    told = said(
        capsys, "plan", "run.yaml", "--search", "--set", "plan.flops=1e9", "plan.memory=1 KiB",
        code=1,
    )  # fmt: skip
    assert "Nothing fits" in told
    assert "of 1.0 KiB" in told


@pytest.mark.parametrize("by", BALANCED_BY)
@pytest.mark.parametrize("objective", ["variance", "bottleneck"])
def test_a_balance_shows_layers_cuts_and_the_line_to_paste(capsys, by, objective):
    text = said(
        capsys, "balance", "run.yaml", "--stages", "3", "--by", by, "--objective", objective
    )
    assert [line for line in text.splitlines() if line.startswith("stage ")][2].startswith(
        "stage 2"
    )
    balance = json.loads(re.search(r"balance: (\[.*\])", text)[1])
    assert len(balance) == 3
    assert sum(balance) == 5
    assert main(["plan", "run.yaml", "--set", "plan.flops=1e9", "pipeline.stages=3",
                 f"pipeline.balance={balance}"]) == 0  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--stages", "0"], "The number of stages is 0", 2),
        (["--stages", "9", "--by", "flops"], "5 layers cannot fill 9 stages", 2),
        (["--by", "flops", "--profile", "nowhere/costs.json"], "nowhere/costs.json cannot be", 2),
        (["--by", "flops", "--profile", "."], "The profile . cannot be read or written", 2),
        (["--set", "pipeline.stages=null"], "The number of stages is None", 2),
        (["--set", "plan.memory=much"], "plan.memory", 2),
        (["--set", "plan.memroy=1 GiB"], "Did you mean `memory`", 2),
    ],
)
def test_mistakes_are_told_without_a_traceback(capsys, arguments, message, code):
    assert message in said(capsys, "balance", "run.yaml", *arguments, code=code)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.stages=9"], "5 layers cannot fill 9 stages"),
        (["pipeline.balance=[2, 2]"], "pipeline.balance: [2, 2] is 4 layers, and the model has 5"),
        (
            ["pipeline.schedule=interleaved_1f1b", "pipeline.devices=[cpu, cpu, cpu]",
             "pipeline.stages=4"],
            "4 stages cannot be shared evenly by 3 workers",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_told_without_a_traceback(capsys, overrides, message):
    told = said(capsys, "plan", "run.yaml", "--set", "plan.flops=1e9", *overrides, code=2)
    assert message in told
    assert "pipeline" in told


@pytest.mark.parametrize("by", BALANCED_BY)
def test_a_run_is_balanced_by_what_its_file_says(by):
    run = build(config(pipeline={"stages": 3, "balance": by, "chunks": 2}))
    assert len(run.model.balance) == 3
    assert sum(run.model.balance) == 5


def test_a_measured_balance_stands_as_a_list_in_the_resolved_file():
    run = build(config(pipeline={"stages": 3, "balance": "time"}))
    assert run.config.pipeline.balance == tuple(run.model.balance)
    again = build(config(pipeline={"stages": 2, "balance": "parameters"}))
    assert again.config.pipeline.balance == "parameters"


def test_measuring_does_not_change_the_weights_that_the_seed_gives():
    weights = [
        build(config(pipeline={"stages": 2, "balance": by})).model.state_dict()
        for by in ("parameters", "time", "memory", "flops")
    ]
    for other in weights[1:]:
        assert all(torch.equal(other[name], weights[0][name]) for name in other)


def test_the_papers_largest_transformer_is_planned_on_a_laptop(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(nn.Module, "to", None)  # nothing is brought anywhere
    text = said(capsys, "plan", "examples/plan_paper_transformer.yaml")
    assert text.startswith("128 stages of 13 to 14 layers on 128 devices, 32 rows in 32")
    assert "too much" not in text


def test_under_bf16_activations_are_planned_half_as_large(capsys):
    def inside(precision: str) -> list[str]:
        text = said(
            capsys, "plan", "run.yaml", "--set", "plan.flops=1e9", f"train.precision={precision}",
            "pipeline.checkpoint=never",
        )  # fmt: skip
        return text.splitlines()[-2].split()

    assert inside("fp32") != inside("bf16")


class Faulty(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise ValueError("a fault of the layer")


def faulty() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 10), Faulty(10, 10))


# It was told as a mistake in the run file, without its traceback.
@pytest.mark.parametrize("by", ["time", "memory", "flops"])
def test_a_fault_of_a_layer_shows_as_itself(by):
    model = {"factory": f"{__name__}:faulty"}
    with pytest.raises(ValueError, match="a fault of the layer") as caught:
        build(config(model=model, pipeline={"stages": 2, "balance": by}))
    assert any("layer 1" in note for note in caught.value.__notes__)


# It was refused, while `gpipe train` ran the same file.
@pytest.mark.parametrize("keeps", [True, False])
def test_a_balance_by_flops_is_planned_without_knowing_a_device(capsys, keeps):
    where = ["--profile", "costs.json"] if keeps else []
    if keeps:
        said(capsys, "plan", "run.yaml", *where)  # without operations
    text = said(capsys, "plan", "run.yaml", "--set", "pipeline.balance=flops", *where)
    flops = [64 * 32, 0, 32 * 16, 0, 16 * 10]
    assert f"2 stages {balance_costs(flops, 2)} on" in text
    assert re.search(r"step [\d.e-]+ s", text)


# The measurement took half the threads for each stage, whatever --stages said.
@pytest.mark.parametrize(("stages", "share"), [("1", 4), ("2", 2), ("4", 1), ("5", 1)])
def test_the_threads_are_divided_by_the_stages_that_are_asked_for(
    capsys, monkeypatch, stages, share
):
    shares = []

    def noted(*args: object, num_threads: int, **kwargs: object) -> LayerCosts:
        shares.append(num_threads)
        return profile(*args, num_threads=1, **kwargs)

    monkeypatch.setattr(costing, "profile", noted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    said(capsys, "balance", "run.yaml", "--stages", stages)
    assert shares == [share]
