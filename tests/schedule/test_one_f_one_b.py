import pytest

from gpipe.schedule import Kind, one_f_one_b, peak_held, picture


def letters(row):
    return "".join(action.kind for action in row)


def test_the_drawing_in_the_docstring_is_what_is_built():
    lines = [line.strip() for line in one_f_one_b.__doc__.splitlines()]
    drawn = [line for line in lines if line.startswith("worker ")]
    assert len(drawn) == 4
    assert drawn == picture(one_f_one_b(4, 4)).splitlines()


def test_runs_ahead_then_in_turn_then_drains():
    rows = one_f_one_b(3, 5).rows
    assert [letters(row) for row in rows] == ["FFFBFBFBBB", "FFBFBFBFBB", "FBFBFBFBFB"]


def test_fewer_microbatches_than_stages():
    rows = one_f_one_b(4, 2).rows
    assert [letters(row) for row in rows] == ["FFBB", "FFBB", "FFBB", "FBFB"]


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD])
def test_runs_from_the_first_microbatch_to_the_last(kind):
    for row in one_f_one_b(4, 6).rows:
        assert [action.microbatch for action in row if action.kind == kind] == list(range(6))


def test_worker_k_holds_at_most_the_stages_from_its_own_on():
    assert peak_held(one_f_one_b(4, 16)) == (4, 3, 2, 1)
    assert peak_held(one_f_one_b(4, 2)) == (2, 2, 2, 1)


def test_refuses_impossible_sizes():
    with pytest.raises(ValueError, match=r"`num_stages` is -3. Pass a whole number of at least 1."):
        one_f_one_b(-3, 4)
    with pytest.raises(ValueError, match=r"`num_microbatches` is 0. Pass a whole number"):
        one_f_one_b(4, 0)
    with pytest.raises(
        TypeError, match=r"`num_stages` is None, of type NoneType. Pass a whole number"
    ):
        one_f_one_b(None, 4)
