"""Whatever users do: streams are ordered where they must be, and nowhere else."""

from collections.abc import Iterator
from time import perf_counter

import pytest

from tests.streams.fakes import Call, World
from tests.streams.scenarios import SCENARIOS, run


@pytest.fixture(scope="module")
def worlds() -> dict[str, World]:
    """Each scenario, with everything in place; first the quickest, which find most calls."""
    found, lasted_s = {}, {}
    for name in SCENARIOS:
        start_s = perf_counter()
        found[name] = run(name)
        lasted_s[name] = perf_counter() - start_s
    return {name: found[name] for name in sorted(found, key=lasted_s.__getitem__)}


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_missing(worlds, name):
    assert worlds[name].detector.reports == []


def test_no_call_can_be_left_out(worlds):
    calls = list(dict.fromkeys(call for world in worlds.values() for call in world.calls))
    kinds = {call.name for call in calls}
    assert kinds == {"record_event", "wait_event", "retain", "synchronize"}
    assert [call for call in calls if not any(reports_without(call, worlds))] == []


def reports_without(call: Call, worlds: dict[str, World]) -> Iterator[list[str]]:
    """What the detector says to each scenario in which the engine makes this call."""
    for name, world in worlds.items():
        if call in world.calls:
            yield run(name, (call,)).detector.reports
