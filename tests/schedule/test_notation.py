import pytest

from gpipe.errors import ScheduleError
from gpipe.schedule import (
    add_recompute,
    add_transfers,
    from_text,
    interleaved_1f1b,
    load_schedule,
    one_f_one_b,
    picture,
    resolve,
    save_schedule,
    to_text,
)
from tests.schedule.members import MODES, NAMES


def test_the_text_in_the_docstring_is_what_is_written():
    lines = [line.strip() for line in to_text.__doc__.splitlines()]
    start = lines.index("2 stages")
    assert lines[start : start + 4] == to_text(one_f_one_b(2, 2)).splitlines()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_written_is_read_back(name, mode):
    schedule = add_recompute(resolve(name, 3, 12), mode)
    for each in (schedule, add_transfers(schedule, [(0, 2)])):
        assert from_text(to_text(each)) == each


def test_a_drawing_and_a_commented_hand_written_file_are_read_too():
    assert from_text(picture(interleaved_1f1b(2, 2, 3))) == interleaved_1f1b(2, 2, 3)
    text = """
    # my own
    worker 0  F0.0 F0.1 B0.0 B0.1   # the first stage

    worker 1  F1.0 B1.0 F1.1 B1.1
    """
    assert from_text(text) == one_f_one_b(2, 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "worker 0  F0.0 G0.0",
            r"'G0.0' in line 1 is no action. Write F, R or B, the stage, a dot",
        ),
        ("worker 0  F0.0 B0", r"'B0' in line 1 is no action"),
        ("worker 0  F0.0 A0>.0", r"'A0>.0' in line 1 is no action.*or a transfer, such as A0>1.3"),
        ("worker 0  F0.0\nwroker 1 F1.0", r"Line 2, 'wroker 1 F1.0', is no line of a schedule"),
        ("worker 1  F0.0 B0.0", r"Line 1 is the row of worker 1, and worker 0 is next"),
        ("", r"0 actions cannot be a schedule of 1 stages and 1 micro-batches"),
        ("worker 0", r"0 actions cannot be a schedule"),
        ("0 stages\nworker 0  F0.0 B0.0", r"2 actions cannot be a schedule of 0 stages and 1"),
        ("worker 0  F0.1000000000", r"1 actions cannot be a schedule of 1 stages and 1000000001"),
    ],
)
def test_a_mistake_is_told_with_its_line(text, told):
    with pytest.raises(ScheduleError, match=told):
        from_text(text)


@pytest.mark.parametrize("name", ["mine.txt", "mine.csv", "MINE.CSV"])
def test_files_are_written_and_read(tmp_path, name):
    save_schedule(one_f_one_b(3, 4), tmp_path / name)
    assert load_schedule(tmp_path / name) == one_f_one_b(3, 4)
    assert ("0F0" in (tmp_path / name).read_text()) == (name.lower().endswith("csv"))


def test_what_is_wrong_with_a_file_names_it(tmp_path):
    with pytest.raises(ScheduleError, match=r"There is no file .*none.txt. Check the path."):
        load_schedule(tmp_path / "none.txt")
    with pytest.raises(ScheduleError, match=r"cannot be read: .* Pass a text file."):
        load_schedule(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match=r"binary cannot be read: .*Pass a text file."):
        load_schedule(tmp_path / "binary")
    (tmp_path / "bad.csv").write_text("0F0,0X0\n")
    with pytest.raises(ScheduleError, match=r"bad.csv: '0X0' in line 1 is neither a forward nor"):
        load_schedule(tmp_path / "bad.csv")
