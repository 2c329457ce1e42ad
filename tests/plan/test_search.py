"""The search finds what trying everything finds."""

from itertools import product

import pytest

from gpipe.errors import PlanError
from gpipe.partition import balance_costs
from gpipe.plan import DeviceSpec, Grid, plan, search
from gpipe.plan.grid import balances
from gpipe.plan.text import found_text
from gpipe.schedule import LOOPED_SCHEDULES, RECOMPUTE_MODES, SCHEDULE_NAMES
from tests.plan.members import layer_costs, random_layers

ROWS = 8
CHUNKS = (1, 2, 4, 8)


def everything(costs, devices, num_devices):
    """Each way in the grid, simulated: its time if it fits, and how much memory lacks."""
    ways = product(num_devices, (1, 2), SCHEDULE_NAMES, RECOMPUTE_MODES, CHUNKS)
    for count, share, schedule, mode, chunks in ways:
        if (share > 1) != (schedule in LOOPED_SCHEDULES) or count * share > costs.num_layers:
            continue
        for balance in balances(costs, count * share):
            made = plan(
                costs, balance, rows=ROWS, chunks=chunks, schedule=schedule, checkpoint=mode,
                num_workers=count, devices=devices, optimizer_bytes_per_gradient_byte=2.0,
            )  # fmt: skip
            yield (schedule, mode, chunks, count, balance), made


@pytest.mark.parametrize("memory_bytes", [float("inf"), 4000.0, 3000.0, 1500.0])
@pytest.mark.parametrize("seed", range(4))
def test_it_finds_what_simulating_everything_finds(seed, memory_bytes):
    costs = random_layers(seed)
    devices = DeviceSpec(memory_bytes=memory_bytes, bandwidth_bytes_per_s=40, latency_s=0.1)
    num_devices = (1, 2, 3)
    all_ways = list(everything(costs, devices, num_devices))
    fitting = sorted(made.step_s for _, made in all_ways if made.crowded is None)
    grid = Grid(num_devices=num_devices, chunks=CHUNKS)
    options = {"rows": ROWS, "devices": devices, "optimizer_bytes_per_gradient_byte": 2.0}
    if not fitting:
        with pytest.raises(PlanError, match="Nothing fits"):
            search(costs, grid, **options)
        return
    found = search(costs, grid, **options)
    assert [made.step_s for _, made in found.best] == fitting[: len(found.best)]
    assert all(made.crowded is None for _, made in found.best)
    times_s = {way: made.step_s for way, made in all_ways}
    assert all(times_s[way] == made.step_s for way, made in found.best)
    assert [times_s[way] for way, _ in found.next] == fitting[3 : 3 + len(found.next)]
    lacking = {way for way, made in all_ways if made.crowded is not None}
    assert all(way in lacking and times_s[way] < fitting[0] for way, _ in found.too_large)


def test_the_limits_of_these_tests_bite():
    grid, devices = Grid(num_devices=(1, 2, 3), chunks=CHUNKS), DeviceSpec(memory_bytes=3000)
    found = search(
        random_layers(0), grid, rows=ROWS, devices=devices, optimizer_bytes_per_gradient_byte=2.0
    )
    assert found.too_large


def test_each_that_loses_has_a_reason():
    found = search(random_layers(0), Grid(num_devices=(1, 2)), rows=ROWS, devices=DeviceSpec())
    assert len(found.best) == 3
    for _, reason in found.next:
        assert "slower" in reason or "as fast" in reason
    text = found_text(found, ROWS)
    assert text.startswith("1. ")
    assert "Next, and why they lose:" in text
    assert f"balance: {list(found.best[0][0].balance)}" in text


def test_nothing_fits_is_said_with_both_numbers_and_a_remedy():
    devices = DeviceSpec(memory_bytes=300)
    with pytest.raises(PlanError) as caught:
        search(layer_costs(), Grid(num_devices=(1, 2)), rows=ROWS, devices=devices)
    text = str(caught.value)
    assert "of 300 B" in text
    assert "needs " in text
    assert "Use more devices" in text


def test_memory_decides_between_checkpoint_modes():
    costs = layer_costs([1.0] * 4, saved_bytes=[1000.0] * 4)
    wide = search(costs, Grid(num_devices=(2,)), rows=8, devices=DeviceSpec())
    assert wide.best[0][0].checkpoint == "never"
    narrow = search(costs, Grid(num_devices=(2,)), rows=8, devices=DeviceSpec(memory_bytes=5000))
    assert narrow.too_large
    assert "would take" in narrow.too_large[0][1]


def test_a_device_that_is_described_for_each_limits_their_number():
    found = search(
        layer_costs(), Grid(num_devices=(1, 2, 3, 4)), rows=8, devices=[DeviceSpec()] * 2
    )
    assert max(candidate.num_devices for candidate, _ in found.best) == 2


def test_cuts_are_those_of_balance_costs():
    costs = random_layers(1)
    times_s = [a + b for a, b in zip(costs.forward_s, costs.backward_s, strict=True)]
    assert tuple(balance_costs(times_s, 3)) in balances(costs, 3)
