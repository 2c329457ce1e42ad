"""`--profile`: files that cannot be read, or hold what costs cannot be."""

import json
from pathlib import Path

import pytest

from gpipe.costs import LayerCosts
from gpipe.errors import ConfigError
from gpipe.train.profile_file import load_profile, save_profile
from tests.plan.members import layer_costs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "costs.json"
    layer_costs().save(file)
    return file


def test_a_file_is_read_as_it_was_written(path, tmp_path):
    assert load_profile(path) == layer_costs()
    save_profile(tmp_path / "again.json", layer_costs())
    assert load_profile(tmp_path / "again.json") == LayerCosts.load(path)
    assert load_profile(tmp_path / "none.json") is None


# A name that is too long was a traceback.
@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "none/costs.json"])
def test_a_name_that_cannot_be_is_told(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be read or written") as caught:
        save_profile(tmp_path / name, layer_costs())
    assert len(str(caught.value)) < 300


def test_a_name_that_is_too_long_cannot_be_looked_for(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read or written \(File name too long\)"):
        load_profile(tmp_path / ("x" * 5000))


# Integers beyond every float were a traceback, and 1e308 an infinite time.
@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("forward_s[2]", 10**400),
        ("backward_s[0]", 1e308),
        ("rows", 10**400),
        ("action_s", float("inf")),
        ("memory.storages[1][0]", 10**400),
        ("memory.storages[1][1]", float("nan")),
    ],
)
def test_a_number_beyond_all_is_told_by_its_key(path, key, number):
    content = json.loads(path.read_text())
    *steps, last = key.replace("]", "").replace("[", ".").split(".")
    place = content["costs"]
    for step in steps:
        place = place[int(step) if step.isdigit() else step]
    place[int(last) if last.isdigit() else last] = number
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    assert f"`costs.{key}`" in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("names", 5),
        ("names", "abcd"),
        ("names", [1, 2, 3, 4]),
        ("memory", []),
        ("memory", {"storages": 1}),
        ("rows", "many"),
        ("rows", True),
        ("forward_s", {"a": 1}),
        ("forward_s", "abcd"),
        ("is_proportional", 7),
        ("action_s", None),
        ("dtype", 7),
        ("forward_flops_per_row", "abcd"),
    ],
)
def test_a_value_of_another_type_is_told(path, key, value):
    content = json.loads(path.read_text())
    content["costs"][key] = value
    path.write_text(json.dumps(content))
    try:
        load_profile(path)
    except ConfigError as error:
        assert str(path) in str(error)  # noqa: PT017 - some values are another model, which is told later


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", '{"costs": 7}', "[" * 100_000, "\0"])
def test_what_is_no_profile_is_told(path, content):
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"costs\.json"):
        load_profile(path)
