import pytest

from gpipe.schedule import SCHEDULES, fill_drain, one_f_one_b, resolve


def test_names_stand_for_builders():
    assert {"fill_drain": fill_drain, "1f1b": one_f_one_b}.items() <= SCHEDULES.items()


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_name_becomes_a_schedule(name):
    assert resolve(name, 3, 4) == SCHEDULES[name](3, 4)


@pytest.mark.parametrize(
    ("name", "nearest"), [("filldrain", "fill_drain"), ("1F1B", "1f1b"), ("1f1", "1f1b")]
)
def test_an_unknown_name_is_told_the_nearest(name, nearest):
    with pytest.raises(
        ValueError,
        match=f"`schedule` is '{name}'. Use one of 'fill_drain', '1f1b'.*nearest: '{nearest}'",
    ):
        resolve(name, 3, 4)


def test_refuses_other_types_and_sizes():
    with pytest.raises(
        TypeError, match=r"`schedule` is 3, of type int. Use one of 'fill_drain', '1f1b'"
    ):
        resolve(3, 3, 4)
    with pytest.raises(ValueError, match="`num_microbatches` is 0"):
        resolve("1f1b", 3, 0)
