"""A run file is checked before anything else happens, all mistakes at once (CASES 32)."""

import copy
import re
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpipe.errors import ConfigError
from gpipe.train.config import RunConfig, load
from gpipe.train.run_file import dump, parse

SHORTEST: dict[str, Any] = {
    "name": "short",
    "model": {"factory": "gpipe.models:mlp", "sizes": [4, 2]},
    "data": {"factory": "gpipe.data:digits", "batch_size": 8},
    "loss": "mse",
    "optimizer": {"name": "SGD"},
}


@pytest.fixture
def short(tmp_path: Path) -> Path:
    return write(tmp_path, yaml.safe_dump(SHORTEST))


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def mistakes_of(path: Path, *overrides: str) -> list[str]:
    """The lines of the one error, without the heading."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_the_shortest_run_file_has_documented_defaults(short: Path) -> None:
    config = load(short)

    assert (config.seed, config.output_dir, config.loss_reduction) == (0, "runs", None)
    assert config.pipeline.model_dump() == {
        "stages": None,
        "balance": "parameters",
        "chunks": 1,
        "schedule": "1f1b",
        "devices": None,
        "deferred_batch_norm": False,
        "checkpoint": "except_last",
        "processes": False,
        "replicas": 1,
        "all_reduce": "backend",
        "patience_s": 8.0,
        "watchdog_s": None,
    }
    assert config.lr_schedule.model_dump() == {"name": "constant", "warmup_steps": 0}
    assert config.train.model_dump() == {"epochs": 1, "precision": "fp32", "clip_grad_norm": None}


def test_other_keys_are_arguments_of_what_a_section_names(short: Path) -> None:
    config = load(short, ["data.test_fraction=0.5", "optimizer.lr=0.1"])

    assert config.model.arguments == {"sizes": [4, 2]}
    assert config.data.arguments == {"test_fraction": 0.5}
    assert config.optimizer.arguments == {"lr": 0.1}


def test_a_configuration_is_frozen(short: Path) -> None:
    config = load(short)

    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.seed = 1  # type: ignore[misc]


def test_three_famous_mistakes_are_told_at_once(short: Path) -> None:
    found = mistakes_of(short, "pipeline.chunks=four", "trainig.epochs=2", "train.num-epochs=2")

    assert found == [
        'pipeline.chunks: "four" is not allowed. Give a whole number, 1 or more, up to 65536.',
        "train.num-epochs: is no key (value 2). Did you mean `epochs`?"
        " Known keys here: epochs, precision, clip_grad_norm.",
        'trainig: is no key (value {"epochs": 2}). Did you mean `train`?'
        " Known keys here: name, seed, model, data, loss, loss_reduction, pipeline, optimizer,"
        " lr_schedule, train, plan, output_dir.",
    ]


def test_a_key_in_the_wrong_section_is_found_in_the_right_one(short: Path) -> None:
    [found] = mistakes_of(short, "num-epochs=2")

    assert "Did you mean `train.epochs`?" in found


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("pipeline.chunks=true", "pipeline.chunks: true is not allowed. Give a whole number"),
        ("pipeline.chunks=0", "pipeline.chunks: 0 is not allowed. Give a whole number, 1 or more"),
        ("pipeline.chunks=2.0", "pipeline.chunks: 2.0 is not allowed. Give a whole number"),
        ("pipeline.chunks=", "pipeline.chunks: null is not allowed. Give a whole number"),
        ("pipeline.stages=-1", "pipeline.stages: -1 is not allowed"),
        (
            "pipeline.schedule=1F1b",
            "Give fill_drain, 1f1b, interleaved_1f1b or looped_breadth_first. Did you mean `1f1b`?",
        ),
        ("pipeline.schedule=filldrain", "Did you mean `fill_drain`?"),
        ("pipeline.checkpoint=sometimes", "Give always, except_last or never."),
        ("pipeline.balance=parameter", 'pipeline.balance: "parameter" is not allowed'),
        ("pipeline.balance=[2, 0]", "pipeline.balance: [2, 0] is not allowed"),
        ("pipeline.balance=[2, -1]", "pipeline.balance: [2, -1] is not allowed"),
        ("pipeline.balance=[2, true]", "pipeline.balance: [2, true] is not allowed"),
        ("pipeline.balance=[]", "pipeline.balance: [] is not allowed"),
        ("pipeline=3", "pipeline: 3 is not allowed. Give a section with the keys stages, balance"),
        ("model=3", "Give a section with the keys factory and arguments."),
        ("model.factory=mlp", 'model.factory: "mlp" is not allowed. Give "module:callable"'),
        ("loss=cross_entrpy", "Did you mean `cross_entropy`?"),
        ("loss_reduction=average", "Give mean, sum or weighted; left out: mean."),
        ("train.clip_grad_norm=0", "train.clip_grad_norm: 0 is not allowed. Give a number greater"),
        ("train.clip_grad_norm=.inf", "train.clip_grad_norm: Infinity is not allowed"),
        ("train.precision=fp16", 'train.precision: "fp16" is not allowed. Give fp32 or bf16'),
        ("lr_schedule.warmup_steps=-1", "lr_schedule.warmup_steps: -1 is not allowed"),
        ("seed=-1", "seed: -1 is not allowed. Give a whole number, 0 or more."),
        ("name=a/b", 'name: "a/b" is not allowed. Give letters, digits'),
        ("name=..", 'name: ".." is not allowed'),
        ("data.batch_size=1.5", "data.batch_size: 1.5 is not allowed"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_allowed(short: Path, override: str, told: str) -> None:
    [found] = mistakes_of(short, override)

    assert told in found


def test_a_missing_section_and_a_missing_key_are_told(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\nmodel: {}\nloss: mse\noptimizer: {name: SGD}\n")

    assert mistakes_of(path) == [
        'model.factory: is missing. Give "module:callable", for example "gpipe.models:mlp".',
        "data: is missing. Give a section with the keys factory, batch_size and arguments.",
    ]


def test_a_key_that_is_no_text_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump(SHORTEST | {7: "x"}))

    assert mistakes_of(path) == ["7: 7 is not allowed. Give keys that are text."]


def test_stages_must_agree_with_a_listed_balance(short: Path) -> None:
    assert mistakes_of(short, "pipeline.balance=[1, 1]", "pipeline.stages=3") == [
        "pipeline.balance: lists 2 stages, but `stages` is 3."
        " Give one number of layers for every stage, or leave `stages` out."
    ]


def test_a_balance_needs_no_stages(short: Path) -> None:
    assert load(short, ["pipeline.balance=[1, 1]"]).pipeline.balance == (1, 1)


@pytest.mark.parametrize(("text", "number"), [("1e-3", 1e-3), ("5E2", 500.0), ("-1.5e+3", -1500.0)])
def test_an_exponent_makes_a_number(short: Path, text: str, number: float) -> None:
    """YAML 1.1 reads `1e-3` as text; `lr: 1e-3` is what everyone writes."""
    assert load(short, [f"optimizer.lr={text}"]).optimizer.arguments == {"lr": number}


class TestOverrides:
    def test_values_are_yaml(self, short: Path) -> None:
        config = load(short, ["model.sizes=[8, 4]", "name='1e3'", "loss_reduction=sum"])

        assert (config.model.arguments["sizes"], config.name) == ([8, 4], "1e3")

    def test_the_last_one_of_a_path_wins(self, short: Path) -> None:
        assert load(short, ["seed=1", "seed=2"]).seed == 2

    def test_an_empty_section_can_be_filled(self, tmp_path: Path) -> None:
        path = write(tmp_path, yaml.safe_dump(SHORTEST) + "train:\n")

        assert load(path, ["train.epochs=3"]).train.epochs == 3

    def test_all_that_cannot_be_set_is_told_at_once(self, short: Path) -> None:
        assert mistakes_of(short, "seed", "a..b=1", "name.x=1", "seed=[1") == [
            "--set seed: write it as key.path=value, e.g. train.epochs=3",
            "--set a..b=1: write it as key.path=value, e.g. train.epochs=3",
            '--set name.x=1: `name` is "short", which has no keys',
            "--set seed=[1: the value is not valid YAML: line 1, column 3:"
            " expected ',' or ']', but got '<stream end>'.",
        ]


class TestFile:
    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("", "holds nothing, not keys"),
            ("- a\n- b", "holds a list, not keys"),
            ("just words", "holds a str, not keys"),
            ("name: [a", "is not valid YAML: line 1, column 9"),
            ("name: a\nname: b", "line 2, column 1: the key `name` stands here and in line 1"),
            ("train: {epochs: 1, epochs: 2}", "the key `epochs` stands here and in line 1"),
            ("name: !!python/object:os.abort {}", "could not determine a constructor"),
            ("name: \0", "is not valid YAML"),
        ],
    )
    def test_refuses_what_holds_no_keys(self, tmp_path: Path, text: str, told: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(told)):
            load(write(tmp_path, text))

    def test_refuses_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"There is no file .*none\.yaml"):
            load(tmp_path / "none.yaml")

    def test_refuses_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"cannot be read: .*[Dd]irectory"):
            load(tmp_path)

    def test_refuses_other_encodings(self, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        path.write_bytes("name: café".encode("latin-1"))

        with pytest.raises(ConfigError, match="Give a YAML file in UTF-8"):
            load(path)


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
arguments = st.dictionaries(st.text(min_size=1), scalars | st.lists(scalars), max_size=3)


@given(name=names, texts=arguments, chunks=st.integers(1, 99), clip=st.none() | st.floats(0.1, 9))
def test_a_resolved_configuration_loads_again(
    name: str, texts: dict[str, object], chunks: int, clip: float | None
) -> None:
    """Also names such as `1e5` and `no`, which must come back as the text that they were."""
    content = copy.deepcopy(SHORTEST) | {"name": name, "train": {"clip_grad_norm": clip}}
    content["pipeline"] = {"chunks": chunks, "balance": [1]}
    content["model"] = texts | content["model"]
    config = RunConfig.model_validate(content)

    again = parse(dump(config.model_dump()), "dumped")

    assert RunConfig.model_validate(again) == config
