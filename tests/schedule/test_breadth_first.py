"""Fill-drain for stages on any workers."""

from gpipe.schedule import check, fill_drain, looped_breadth_first, picture
from gpipe.schedule.breadth_first import breadth_first


def test_with_one_stage_a_worker_it_is_fill_drain():
    assert breadth_first(range(4), 3) == fill_drain(4, 3)


def test_with_stages_in_turn_it_is_looped():
    assert breadth_first([0, 1, 0, 1], 3) == looped_breadth_first(2, 2, 3)


def test_neighbouring_stages_may_share_a_worker():
    schedule = breadth_first([0, 0, 1], 2)
    check(schedule)
    assert picture(schedule).splitlines() == [
        "worker 0  F0.0 F0.1 F1.0 F1.1  .    .   B1.1 B1.0 B0.1 B0.0",
        "worker 1   .    .    .   F2.0 F2.1 B2.1 B2.0  .    .    .",
    ]


def test_any_places_pass_the_check():
    for worker_of in ([1, 0], [1, 1, 0], [0, 1, 1, 0], [2, 0, 1, 0, 2]):
        for num_microbatches in (1, 2, 5):
            check(breadth_first(worker_of, num_microbatches))
