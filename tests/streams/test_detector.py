"""The detector itself: what it must see and what it must not."""

import pytest

from tests.streams.detector import Detector, Lane, Memory

ONE, OTHER = "one", "other"


@pytest.fixture
def detector() -> Detector:
    return Detector()


@pytest.fixture
def lanes() -> tuple[Lane, Lane]:
    return Lane(ONE), Lane(OTHER)


def made_on(detector: Detector, lane: Lane) -> Memory:
    memory = Memory(lane)
    detector.book("make", lane, [], [memory])
    return memory


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("access", ["read", "write"])
def test_what_follows_a_write_must_wait(detector, lanes, access, waits):
    one, other = lanes
    memory = made_on(detector, one)
    if waits:
        other.wait(one.clock)
    detector.book(access, other, *(([memory], []) if access == "read" else ([], [memory])))
    expected = [] if waits else [f"{access} on {OTHER} does not wait for make on {ONE}"]
    assert detector.reports == expected


@pytest.mark.parametrize("waits", [False, True])
def test_a_write_must_wait_for_reads(detector, lanes, waits):
    one, other = lanes
    memory = made_on(detector, one)
    other.wait(one.clock)
    detector.book("read", other, [memory], [])
    if waits:
        one.wait(other.clock)
    detector.book("write", one, [], [memory])
    assert detector.reports == (
        [] if waits else [f"write on {ONE} does not wait for read on {OTHER}"]
    )


def test_two_reads_need_no_order(detector, lanes):
    one, other = lanes
    memory = made_on(detector, one)
    other.wait(one.clock)
    detector.book("read", other, [memory], [])
    detector.book("read", one, [memory], [])
    assert detector.reports == []


def test_an_event_orders_only_what_was_before_it(detector, lanes):
    one, other = lanes
    moment = dict(one.clock)
    memory = made_on(detector, one)
    other.wait(moment)
    detector.book("read", other, [memory], [])
    assert len(detector.reports) == 1


@pytest.mark.parametrize("cure", [None, "wait", "retain"])
def test_memory_goes_back_to_the_lane_that_made_it(detector, lanes, cure):
    one, other = lanes
    memory = made_on(detector, one)
    other.wait(one.clock)
    detector.book("read", other, [memory], [])
    if cure == "wait":
        one.wait(other.clock)
    elif cure == "retain":
        memory.retained_for.append(other)
    detector.free(memory)
    assert bool(detector.reports) == (cure is None)


def test_what_the_host_enqueues_comes_after_what_it_has_waited_for(detector, lanes):
    one, other = lanes
    memory = made_on(detector, one)
    detector.host.wait(one.clock)
    detector.book("read", other, [memory], [])
    assert detector.reports == []
