import json
from dataclasses import FrozenInstanceError, replace

import pytest

from gpipe.costs import BoundaryTensor, LayerCosts, LayerMemory, SharedParameter, Size, Skip
from gpipe.costs.size import line_through
from gpipe.errors import ConfigError


def boundary(*storages: tuple[int | None, float]) -> tuple[BoundaryTensor, ...]:
    return tuple(BoundaryTensor(storage, Size(0, size)) for storage, size in storages)


def four_layers() -> LayerCosts:
    """The output of a layer is what the next one saves, except that layer 2 saves its own.

    Storages by layer: 0 is the sample, 1 to 4 are the outputs, 5 is the inside of layer 1.
    """
    return LayerCosts(
        names=("a", "b", "c", "d"),
        rows=8,
        dtype="float32",
        device="cpu",
        forward_s=[1, 2, 3, 4],
        backward_s=[2, 4, 6, 8],
        forward_fixed_s=[1, 0, 1, 0],
        parameter_bytes=[10, 20, 0, 40],
        memory=LayerMemory(
            storages=[(0, 10), (0, 20), (0, 30), (0, 40), (0, 50), (100, 5)],
            saved=[(0,), (1, 5), (3,), (3,)],
            written=[(), (), (), ()],
            boundaries=[boundary(each) for each in [(0, 10), (1, 20), (2, 30), (3, 40), (4, 50)]],
        ),
    )


def test_times_have_a_fixed_part_and_one_that_grows_with_the_rows():
    stages = four_layers().stage_costs([1, 1, 2], 4)
    assert stages.forward_s == (1, 1, 1 + 1 + 2)
    assert stages.backward_s == (1, 2, 3 + 4)
    assert stages.recompute_s == stages.forward_s


def test_a_storage_is_held_once_by_a_stage_and_its_input_apart():
    costs = four_layers()
    whole = costs.stage_costs([4], 2)
    assert whole.held_bytes == (2 * (10 + 20 + 40 + 5) + 100,)
    assert whole.input_bytes == (20,)
    parts = costs.stage_costs([1, 1, 1, 1], 2)
    assert parts.input_bytes == (20, 40, 60, 80)
    assert parts.held_bytes == (20, 40 + 110, 60 + 80, 80)
    assert parts.boundary_bytes == (40, 60, 80, 100)


def test_a_stage_that_writes_into_its_input_holds_a_copy():
    costs = four_layers()
    memory = replace(costs.memory, written=[(), (1,), (), ()])
    costs = replace(costs, memory=memory)
    assert costs.stage_costs([1, 3], 1).held_bytes == (10, 20 + 20 + 40 + 105)
    assert costs.stage_costs([2, 2], 1).held_bytes == (10 + 20 + 105, 30 + 40)


def test_skips_are_received_and_sent_and_held_once():
    skips = [Skip("s", 0, 3, boundary((1, 20))), Skip("none", 0, 3, ())]
    costs = four_layers()
    costs = replace(costs, memory=replace(costs.memory, saved=[(0,), (), (), (1, 3)], skips=skips))
    stages = costs.stage_costs([1, 2, 1], 2)
    assert stages.skip_bytes == {(0, 2): 40}
    assert stages.input_bytes == (20, 40, 80 + 40)
    assert stages.held_bytes == (20, 40, 80 + 40)
    assert costs.stage_costs([4], 2).skip_bytes == {}
    assert costs.stage_costs([4], 2).input_bytes == (20,)


def test_bandwidth_and_latency_are_passed_on():
    stages = four_layers().stage_costs([2, 2], 1, bandwidth_bytes_per_s=[7], latency_s=[0.5])
    assert (stages.bandwidth_bytes_per_s, stages.latency_s) == ((7,), (0.5,))


def test_what_each_layer_is_the_first_to_save():
    costs = four_layers()
    assert costs.saved_bytes_per_row == (10, 25, 40, 0)
    assert costs.memory.saved_sizes[1] == Size(100, 25)
    assert costs.output_bytes_per_row == (20, 30, 40, 50)


def test_lists_become_tuples_and_what_is_left_out_is_zero():
    costs = four_layers()
    assert costs.forward_s == (1, 2, 3, 4)
    assert costs.buffer_bytes == costs.backward_fixed_s == (0, 0, 0, 0)
    assert costs.is_proportional == (True, True, True, True)
    assert costs.forward_flops_per_row is None
    assert hash(costs) == hash(four_layers())
    with pytest.raises(FrozenInstanceError):
        costs.rows = 3


@pytest.mark.parametrize(
    ("full", "fewer", "rows", "expected"),
    [
        (10, 6, (8, 4), (2, 1)),
        (10, 10, (8, 4), (10, 0)),
        (10, 12, (8, 4), (10, 0)),  # noise: more rows take no less time
        (10, 4, (8, 4), (0, 1.25)),  # more than in a line: no fixed part is negative
        (10, 10, (8, 8), (0, 1.25)),
    ],
)
def test_the_line_through_two_measurements(full, fewer, rows, expected):
    assert line_through(full, fewer, *rows) == expected


def test_a_file_gives_back_what_was_saved(tmp_path):
    skips = [Skip("s", 0, 3, boundary((None, 20)))]
    costs = four_layers()
    costs = replace(
        costs,
        memory=replace(costs.memory, skips=skips),
        forward_flops_per_row=[1, 2, 3, 4],
        is_proportional=[True, False, True, False],
        cast_bytes=[5, 10, 0, 20],
        shared=[SharedParameter((0, 3), 8, 0)],
    )
    costs.save(tmp_path / "costs.json")
    loaded = LayerCosts.load(tmp_path / "costs.json")
    assert loaded == costs
    assert loaded.stage_costs([2, 2], 3) == costs.stage_costs([2, 2], 3)
    four_layers().save(str(tmp_path / "costs.json"))
    assert LayerCosts.load(str(tmp_path / "costs.json")) == four_layers()


def test_a_file_of_an_earlier_gpipe_has_neither_casts_nor_ties(tmp_path):
    path = changed(tmp_path, lambda content: [content["costs"].pop(n) for n in LATER])
    loaded = LayerCosts.load(path)
    assert loaded == four_layers()
    assert loaded.cast_bytes == (0, 0, 0, 0)
    assert loaded.shared == ()


LATER = ("cast_bytes", "shared")


def changed(tmp_path, change) -> str:
    """A file whose content was changed; its path."""
    path = tmp_path / "costs.json"
    four_layers().save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return str(path)


def drop(name):
    return lambda content: content["costs"].pop(name)


def put(name, value):
    return lambda content: content["costs"].__setitem__(name, value)


def put_in_memory(name, value):
    return lambda content: content["costs"]["memory"].__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda content: content.update(version=2), "has version 2, and this gpipe reads 1"),
        (lambda content: content.pop("version"), "has version None"),
        (lambda content: content.update(format="other"), "its format is 'other', not 'gpipe lay"),
        (lambda content: content.update(costs=[]), "holds list where its costs should be"),
        (drop("forward_s"), r"lacks \['forward_s'\]"),
        (drop("names"), r"lacks \['names'\]"),
        (drop("memory"), r"lacks \['memory'\]"),
        (put("surplus", 1), "unexpected keyword argument 'surplus'"),
        (put("forward_s", [1, 2]), "`forward_s` has 2 numbers for 4 layers"),
        (put("forward_s", 3), "not iterable"),
        (put("forward_s", [1, 2, 3, "4"]), r"`forward_s\[3\]` is '4', of type str"),
        (put("forward_fixed_s", [9, 0, 0, 0]), r"`forward_fixed_s\[0\]` is 9, and `forward_s\[0"),
        (put("rows", 0), "`rows` is 0"),
        (put("names", []), "`num_layers` is 0"),
        (put("is_proportional", [True]), "`is_proportional` is of 1 layers, and there are 4"),
        (put("cast_bytes", [1]), "`cast_bytes` has 1 numbers for 4 layers"),
        (put("shared", 3), "not iterable"),
        (put("shared", [[[0, 1]]]), "missing 2 required positional"),
        (put("shared", [[[0, 4], 1, 1]]), r"`shared\[0\]` is of layers \[0, 4\], and there are 4"),
        (put("shared", [[[1, 0], 1, 1]]), r"`shared\[0\]` is of layers \[1, 0\]"),
        (put("shared", [[[1], 1, 1]]), r"`shared\[0\]` is of layers \[1\]"),
        (put("shared", [[[0, 1], -1, 0]]), r"`shared\[0\].parameter_bytes` is -1"),
        (
            put("shared", [[[0, 1], 30, 0]]),
            r"Layer 0 shares 30 bytes, and `parameter_bytes\[0\]` is 10",
        ),
        (put("shared", [[[0, 1], 5, 5]]), r"shares 5 bytes, and `gradient_bytes\[0\]` is 0"),
        (put("memory", 3), "must be a mapping"),
        (put_in_memory("storages", [[0, 1]]), r"Storages \[1, 2, 3, 4, 5\] are named, and there"),
        (put_in_memory("storages", [[0, -1]] * 6), "`bytes_per_row` is -1"),
        (put_in_memory("storages", [[0]] * 6), "missing 1 required positional argument"),
        (put_in_memory("written", [[]]), "`written` has 1 entries for 4 layers. Give 4"),
        (put_in_memory("boundaries", [[]]), "`boundaries` has 1 entries for 4 layers. Give 5"),
        (put_in_memory("skips", [["s", 3, 1, []]]), "Skip 's' goes from layer 3 to layer 1 of 4"),
    ],
)
def test_a_damaged_file_is_told(tmp_path, change, told):
    path = changed(tmp_path, change)
    with pytest.raises(ConfigError, match=told) as caught:
        LayerCosts.load(path)
    assert str(caught.value).startswith(f"{path} ")
    assert str(caught.value).endswith(
        "Pass a file that LayerCosts.save has written, or profile the model again."
    )


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[1, 2]", b"3", b"[" * 100_000])
def test_a_foreign_file_is_told(tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"costs.json is no .*Pass a file that LayerCosts.save"):
        LayerCosts.load(path)


def test_a_missing_file_is_the_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        LayerCosts.load(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("balance", "rows", "error", "told"),
    [
        ([2, 1], 1, ValueError, r"balance is \[2, 1\], which is 3 layers, but .* of 4. Let the"),
        ([4, 0], 1, ValueError, r"`balance\[1\]` is 0"),
        ([2, 2.0], 1, TypeError, r"`balance\[1\]` is 2.0"),
        ([2, 2], 0, ValueError, "`rows_per_microbatch` is 0"),
        ([2, 2], 1.5, TypeError, "`rows_per_microbatch` is 1.5"),
    ],
)
def test_refuses_stages_that_cannot_be(balance, rows, error, told):
    with pytest.raises(error, match=told):
        four_layers().stage_costs(balance, rows)
