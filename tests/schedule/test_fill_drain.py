import pytest

from gpipe.schedule import Action, Kind, fill_drain, peak_held, picture


def test_the_drawing_in_the_docstring_is_what_is_built():
    lines = [line.strip() for line in fill_drain.__doc__.splitlines()]
    drawn = [line for line in lines if line.startswith("worker ")]
    assert len(drawn) == 4
    assert drawn == picture(fill_drain(4, 4)).splitlines()


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (1, 5), (4, 2), (3, 7)])
def test_every_stage_fills_upwards_and_drains_downwards(num_stages, num_microbatches):
    schedule = fill_drain(num_stages, num_microbatches)
    upwards = list(range(num_microbatches))
    assert schedule.num_workers == num_stages
    for stage, row in enumerate(schedule.rows):
        assert list(row) == [
            *(Action(Kind.FORWARD, stage, microbatch) for microbatch in upwards),
            *(Action(Kind.BACKWARD, stage, microbatch) for microbatch in upwards[::-1]),
        ]


def test_every_worker_holds_all_microbatches():
    assert peak_held(fill_drain(3, 5)) == (5, 5, 5)


def test_refuses_impossible_sizes():
    with pytest.raises(ValueError, match=r"`num_stages` is 0. Pass a whole number of at least 1."):
        fill_drain(0, 4)
    with pytest.raises(ValueError, match=r"`num_microbatches` is -1. Pass a whole number"):
        fill_drain(4, -1)
    with pytest.raises(
        TypeError, match=r"`num_microbatches` is '4', of type str. Pass a whole number"
    ):
        fill_drain(4, "4")
