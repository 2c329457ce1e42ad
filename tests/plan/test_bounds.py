"""No step is shorter than its bound, and no device lacks less."""

import io
import sys

import pytest

from gpipe.plan import DeviceSpec, Grid, plan, search
from gpipe.plan.bounds import ROUNDING, Bounds
from gpipe.plan.grid import Way, balances
from gpipe.plan.progress import Bar
from tests.plan.members import layer_costs, random_layers

ROWS = 8


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold_for_every_way(seed):
    costs = random_layers(seed)
    devices = [
        DeviceSpec(memory_bytes=3000, speed=speed, bandwidth_bytes_per_s=40 * seed, latency_s=0.1)
        for speed in (1.0, 2.0, 0.5)
    ]
    bounds = Bounds(costs, ROWS, devices, 2.0, accumulates=bool(seed % 2))
    ways = list(Way.each(Grid(num_devices=(1, 2, 3)), costs.num_layers, ROWS, 3))
    assert len({way.schedule for way in ways}) == 4
    for way in ways:
        for candidate in map(way.cut, balances(costs, way.num_stages)):
            made = plan(
                costs, candidate.balance, rows=ROWS, chunks=way.chunks, schedule=way.schedule,
                checkpoint=way.checkpoint, num_workers=way.num_devices, devices=devices,
                optimizer_bytes_per_gradient_byte=2.0, accumulates=bool(seed % 2),
            )  # fmt: skip
            roughly_s = bounds.candidate_s(candidate)
            exactly_s = bounds.candidate_s(candidate, counts_recomputes=True)
            for least_s in (bounds.way_s(way), roughly_s, exactly_s):
                assert least_s * (1 - ROUNDING) <= made.step_s
            lacks = [needed - 3000 for needed in made.worker_bytes]
            assert bounds.lack_bytes(candidate) <= max(lacks)


def test_little_is_simulated_of_a_large_grid(monkeypatch):
    """It was all of the grid that is outlined: minutes for 128 devices."""
    module = sys.modules["gpipe.plan.search"]
    outlined, outline = [], module.outline
    monkeypatch.setattr(
        module, "outline", lambda *args, **kwargs: outlined.append(0) or outline(*args, **kwargs)
    )
    costs = layer_costs([1.0] * 64)
    search(costs, Grid(num_devices=range(1, 33)), rows=32, devices=DeviceSpec())
    assert len(outlined) < 100  # of about 6,000


def test_the_bar_is_for_terminals_only(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown(stderr: io.StringIO, is_shown: bool) -> str:
        monkeypatch.setattr(sys, "stderr", stderr)
        with Bar(is_shown=is_shown) as bar:
            bar.update()
        return stderr.getvalue()

    assert shown(io.StringIO(), is_shown=True) == ""
    assert shown(Terminal(), is_shown=False) == ""
    assert "search" in shown(Terminal(), is_shown=True)
