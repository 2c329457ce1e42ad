import pytest

from gpipe.schedule import Action, Kind, add_recompute, fill_drain, predecessors

F, R, B = map(Kind, "FRB")
PLAIN = fill_drain(3, 2)
RECOMPUTED = add_recompute(PLAIN, "always")


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (Action(F, 0, 1), []),
        (Action(F, 2, 1), [Action(F, 1, 1)]),
        (Action(B, 2, 1), [Action(F, 2, 1)]),
        (Action(B, 0, 1), [Action(B, 1, 1), Action(F, 0, 1)]),
    ],
)
def test_without_recompute(action, expected):
    assert list(predecessors(action, PLAIN)) == expected


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (Action(F, 2, 1), [Action(F, 1, 1)]),
        (Action(R, 1, 0), [Action(F, 1, 0)]),  # not the gradient: it runs while that is coming
        (Action(B, 2, 1), [Action(R, 2, 1)]),
        (Action(B, 0, 1), [Action(B, 1, 1), Action(R, 0, 1)]),
    ],
)
def test_with_recompute(action, expected):
    assert list(predecessors(action, RECOMPUTED)) == expected


def test_each_microbatch_asks_for_itself():
    mixed = add_recompute(PLAIN, "except_last")  # stage 2 keeps micro-batch 1, the last one
    assert predecessors(Action(B, 2, 1), mixed) == (Action(F, 2, 1),)
    assert predecessors(Action(B, 2, 0), mixed) == (Action(R, 2, 0),)
