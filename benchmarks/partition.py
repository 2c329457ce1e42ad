"""What partition costs: seconds to balance many layers over many stages."""

import argparse
from collections.abc import Callable
from math import log2
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from gpipe.partition import balance_costs

OBJECTIVES = ("variance", "bottleneck")
NUM_STAGES = 128
SIZES = {1_000: 0.2, 10_000: 1.0}  # layers, and seconds that are aimed at

Costs = Callable[[np.random.Generator, int], Any]


class Setting(NamedTuple):
    """A kind of costs, a size, and the seconds that are aimed at, None where there is no aim."""

    kind: str
    num_layers: int
    num_stages: int = NUM_STAGES
    aim_s: float | None = None
    extras: tuple[str, ...] = ()


def heavy(random: np.random.Generator, num_layers: int) -> Any:
    """One layer, like an embedding, costs a third of all: the bounds leave every place open."""
    costs = random.random(num_layers)
    costs[0] = num_layers / 4
    return costs


KINDS: dict[str, Costs] = {
    "uniform": lambda random, num_layers: random.random(num_layers),
    "bytes": lambda random, num_layers: random.integers(0, 2**34, num_layers),
    "log-normal": lambda random, num_layers: random.lognormal(0, 1, num_layers),
    "one heavy": heavy,
    "equal": lambda random, num_layers: [0.1] * num_layers,
}


def extras_of(setting: Setting, random: np.random.Generator) -> dict[str, Any]:
    """The arguments that the setting adds."""
    num_layers, num_stages = setting.num_layers, setting.num_stages
    mean = num_layers / num_stages
    everything = {
        "memory_bytes": random.integers(0, 100, num_layers),
        "memory_limit_bytes": random.integers(60, 120, num_stages) * mean,
        "cuts": [num_layers // 10, num_layers // 2],
        "speeds": random.random(num_stages) + 0.5,
        "boundary_costs": random.random(num_layers),
    }
    return {name: everything[name] for name in setting.extras}


MEMORY = ("memory_bytes", "memory_limit_bytes")
EXTRAS = (MEMORY, ("cuts",), ("speeds",), ("boundary_costs",))
ALL = (*MEMORY, "cuts", "speeds", "boundary_costs")

PARTS = {
    "Sizes": [Setting(kind, size, aim_s=SIZES[size]) for kind in KINDS for size in SIZES],
    "Growth with the layers, where every place stays open": [
        Setting("one heavy", num_layers) for num_layers in (1_250, 2_500, 5_000, 10_000, 20_000)
    ],
    "Growth with the stages": [
        Setting("one heavy", 10_000, num_stages) for num_stages in (16, 32, 64, 128, 256)
    ],
    "With extras": [
        Setting(kind, 1_000, aim_s=1.0, extras=extras)
        for kind in ("uniform", "one heavy")
        for extras in (*EXTRAS, ALL)
    ],
}


def measure(setting: Setting, objective: str, num_rounds: int) -> float:
    """Seconds of the fastest round."""
    random = np.random.default_rng(0)
    costs = KINDS[setting.kind](random, setting.num_layers)
    extras = extras_of(setting, random)
    rounds_s = []
    for _ in range(num_rounds):
        start_s = perf_counter()
        balance_costs(costs, setting.num_stages, objective, **extras)
        rounds_s.append(perf_counter() - start_s)
    return min(rounds_s)


def line(setting: Setting, times_s: list[float]) -> str:
    """One row of the table."""
    num_layers, num_stages = setting.num_layers, setting.num_stages
    unit = num_stages * num_layers * log2(num_layers)
    is_met = setting.aim_s is None or max(times_s) <= setting.aim_s
    aim = "" if setting.aim_s is None else f"<= {setting.aim_s:g} {'met' if is_met else 'not met'}"
    cells = [
        f"{setting.kind:<10} {num_layers:>6} {num_stages:>4}",
        *(f"{time_s:>10.3f}" for time_s in times_s),
        *(f"{time_s / unit * 1e9:>8.1f}" for time_s in times_s),
        f"{aim:<12}",
        "all" if setting.extras == ALL else ", ".join(setting.extras),
    ]
    return "  ".join(cells).rstrip()


def main() -> None:
    """Measure every setting and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="the fastest of so many counts (3)")
    num_rounds = parser.parse_args().rounds
    print(f"Torch-free, seconds; the fastest of {num_rounds} rounds; ns per K L log2(L).\n")
    names = "  ".join(f"{name:>10}" for name in OBJECTIVES)
    print(f"{'costs':<10} {'L':>6} {'K':>4}  {names}  {'ns':>8}  {'ns':>8}  aim")
    for title, settings in PARTS.items():
        print(f"\n{title}:")
        for setting in settings:
            times_s = [measure(setting, objective, num_rounds) for objective in OBJECTIVES]
            print(line(setting, times_s), flush=True)


if __name__ == "__main__":
    main()
