import pytest

from gpipe.schedule import (
    SCHEDULES,
    Kind,
    Schedule,
    add_recompute,
    fill_drain,
    one_f_one_b,
    picture,
)

NAMES = sorted(SCHEDULES)


def texts(schedule):
    return [" ".join(map(str, row)) for row in schedule.rows]


def test_the_drawing_in_the_docstring_is_what_is_built():
    lines = [line.strip() for line in add_recompute.__doc__.splitlines()]
    drawn = [line for line in lines if line.startswith("worker ")]
    assert len(drawn) == 2
    assert drawn == picture(add_recompute(fill_drain(2, 2), "always")).splitlines()


def test_always_recomputes_directly_before_each_backward():
    assert texts(add_recompute(one_f_one_b(2, 2), "always")) == [
        "F0.0 F0.1 R0.0 B0.0 R0.1 B0.1",
        "F1.0 R1.0 B1.0 F1.1 R1.1 B1.1",
    ]


def test_except_last_keeps_what_goes_backward_at_once():
    # Under 1F1B that is every micro-batch of the last stage, under fill-drain the last
    # micro-batch of every stage: one rule for both, read from the rows.
    assert texts(add_recompute(one_f_one_b(2, 2), "except_last")) == [
        "F0.0 F0.1 R0.0 B0.0 R0.1 B0.1",
        "F1.0 B1.0 F1.1 B1.1",
    ]
    assert texts(add_recompute(fill_drain(2, 2), "except_last")) == [
        "F0.0 F0.1 B0.1 R0.0 B0.0",
        "F1.0 F1.1 B1.1 R1.0 B1.0",
    ]


def test_one_microbatch_needs_no_recompute():
    assert add_recompute(one_f_one_b(4, 1), "except_last") == one_f_one_b(4, 1)


@pytest.mark.parametrize("name", NAMES)
def test_never_changes_nothing(name):
    assert add_recompute(SCHEDULES[name](3, 4), "never") == SCHEDULES[name](3, 4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_is_pure_and_leaves_the_order_of_all_else(name, mode):
    before = SCHEDULES[name](3, 4)
    after = add_recompute(before, mode)
    rows = [[action for action in row if action.kind != Kind.RECOMPUTE] for row in after.rows]
    assert Schedule(rows, 3, 4) == before == SCHEDULES[name](3, 4)


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_a_recompute_that_is_there_stays_where_it_is(mode):
    once = add_recompute(fill_drain(3, 4), "always")
    assert add_recompute(once, mode) == once


def test_recomputes_run_while_the_gradient_is_on_its_way():
    assert picture(add_recompute(fill_drain(3, 2), "always")).splitlines() == [
        "worker 0  F0.0 F0.1 R0.1  .    .    .    .   B0.1 R0.0 B0.0",
        "worker 1   .   F1.0 F1.1 R1.1  .    .   B1.1 R1.0 B1.0  .",
        "worker 2   .    .   F2.0 F2.1 R2.1 B2.1 R2.0 B2.0  .    .",
    ]


def test_names_an_unknown_mode():
    with pytest.raises(
        ValueError,
        match=r"`mode` is 'exceptlast'. Use one of 'always', 'except_last', 'never' "
        r"\(nearest: 'except_last'\)",
    ):
        add_recompute(fill_drain(2, 2), "exceptlast")
    with pytest.raises(TypeError, match=r"`mode` is True, of type bool. Use one of 'always'"):
        add_recompute(fill_drain(2, 2), True)
