import pytest

from gpipe.schedule import Action, Kind
from gpipe.timeline import Event, Timeline
from gpipe.train.tally import Tally


def timeline(makespan_s: float, busy_s: float) -> Timeline:
    """Two workers: the first is busy from start to end, the second for `busy_s`."""
    spans = ((0, makespan_s), (1, busy_s))
    events = (Event(worker, Action(Kind.FORWARD, worker, 0), 0, end) for worker, end in spans)
    return Timeline(tuple(events), num_workers=2)


def test_nothing_is_known_before_the_first_step() -> None:
    tally = Tally()

    assert (tally.rows_per_s, tally.bubble, tally.ideal_bubble) == (0, 0, 0)


def test_rows_are_divided_by_all_seconds() -> None:
    tally = Tally()
    tally.add(8, 1.0, timeline(1, 1), chunks=4)
    tally.add(8, 3.0, timeline(1, 1), chunks=4)

    assert tally.rows_per_s == 4


def test_long_steps_count_for_more_of_the_bubble() -> None:
    tally = Tally()
    tally.add(8, 1.0, timeline(1, 1), chunks=4)  # nobody waits
    tally.add(8, 3.0, timeline(3, 1), chunks=4)  # the second worker waits for 2 of 3 s

    assert tally.bubble == pytest.approx(2 / 8)


def test_the_formula_is_for_the_micro_batches_that_there_were() -> None:
    """The last mini-batch had 2 rows, so that no 4 micro-batches could be made of it."""
    tally = Tally()
    tally.add(8, 1.0, timeline(1, 1), chunks=4)
    tally.add(2, 1.0, timeline(1, 1), chunks=4)

    assert tally.ideal_bubble == pytest.approx((1 / 5 + 1 / 3) / 2)
