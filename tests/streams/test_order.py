"""Whatever users do: streams are ordered where they must be, and nowhere else."""

from collections.abc import Iterator

import pytest

from tests.streams.fakes import Call, World
from tests.streams.scenarios import SCENARIOS, run


@pytest.fixture(scope="module")
def worlds() -> dict[str, World]:
    """Each scenario, with everything in place."""
    return {name: run(name) for name in SCENARIOS}


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
