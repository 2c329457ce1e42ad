import numpy as np
import pytest

from gpipe.arguments import require_choice, require_count


def test_a_count_comes_back_as_an_int():
    assert require_count("num_stages", 3) == 3
    assert type(require_count("num_stages", np.int64(3))) is int


@pytest.mark.parametrize("value", [0, -2, np.int32(0)])
def test_a_count_is_at_least_one(value):
    with pytest.raises(ValueError, match=f"`num_stages` is {value}. Pass a whole number of at le"):
        require_count("num_stages", value)


@pytest.mark.parametrize("value", [2.0, "2", None, True, [2]])
def test_a_count_is_a_whole_number(value):
    with pytest.raises(
        TypeError, match=r"`num_stages` is .*, of type \w+. Pass a whole number of at le"
    ):
        require_count("num_stages", value)


def test_a_choice_comes_back():
    assert require_choice("mode", "never", ("always", "never")) == "never"


def test_an_unknown_choice_is_told_the_allowed_and_the_nearest():
    with pytest.raises(
        ValueError, match=r"`mode` is 'Allways'. Use one of 'always', 'never' \(nearest: 'always'"
    ):
        require_choice("mode", "Allways", ("always", "never"))


def test_nothing_is_called_near_that_is_not():
    with pytest.raises(ValueError, match=r"`mode` is 'xyz'. Use one of 'always', 'never'\.$"):
        require_choice("mode", "xyz", ("always", "never"))


@pytest.mark.parametrize("value", [None, 3, ["always"]])
def test_a_choice_is_a_string(value):
    with pytest.raises(
        TypeError, match=r"`mode` is .*, of type \w+. Use one of 'always', 'never'\."
    ):
        require_choice("mode", value, ("always", "never"))
