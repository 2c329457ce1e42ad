from gpipe.schedule import Action, Kind


def test_text_is_letter_stage_dot_microbatch():
    assert str(Action(Kind.FORWARD, 2, 0)) == "F2.0"
    assert f"{Action(Kind.RECOMPUTE, 0, 11)}" == "R0.11"
    assert str(Action(Kind.BACKWARD, 10, 3)) == "B10.3"


def test_a_kind_is_its_letter_also_as_a_key():
    # A plain Enum hashes by name: FORWARD would equal "F" and yet not be found under it.
    assert {kind: kind.name for kind in Kind}["F"] == "FORWARD"
    assert hash(Kind.BACKWARD) == hash("B")
    assert [Kind(letter) for letter in "FRB"] == [Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD]


def test_equal_actions_are_one_key():
    assert len({Action(Kind.FORWARD, 1, 2), Action(Kind.FORWARD, 1, 2)}) == 1
    assert Action(Kind.FORWARD, 1, 2) != Action(Kind.BACKWARD, 1, 2)
