from gpipe.schedule import Action, Kind, Schedule, add_recompute, fill_drain, peak_held

F, R, B = map(Kind, "FRB")


def test_counts_from_forward_to_backward():
    row = [Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(F, 0, 2)]
    row += [Action(B, 0, 1), Action(B, 0, 2)]
    assert peak_held(Schedule([row], 1, 3)) == (2,)


def test_counts_a_microbatch_once_for_each_stage_of_the_worker():
    row = [Action(F, 0, 0), Action(F, 1, 0), Action(B, 1, 0), Action(B, 0, 0)]
    assert peak_held(Schedule([row], 2, 1)) == (2,)


def test_what_is_recomputed_is_held_all_the_same():
    assert peak_held(add_recompute(fill_drain(2, 3), "always")) == (3, 3)


def test_an_empty_row_holds_nothing():
    assert peak_held(Schedule([[]], 1, 1)) == (0,)
