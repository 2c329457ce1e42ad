"""What our ring costs: its time against torch.distributed.all_reduce on gloo."""

import argparse
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter

import torch
from torch import distributed as dist

from gpipe.execution import ring_all_reduce
from tests.distributed.launch import run

NUM_RANKS = (2, 4)
SIZES_MIB = (1, 2, 4, 8, 16, 32, 64)
AIM = 1.5
NUM_WARM_UP = 3

WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "gloo": dist.all_reduce,
    "ring": ring_all_reduce,
}


def measure(_: int, num_rounds: int) -> dict[tuple[str, int], list[float]]:
    """In each rank: the seconds of each round by way and size; the ways take turns."""
    times_s: dict[tuple[str, int], list[float]] = {}
    for size_mib in SIZES_MIB:
        tensor = torch.empty(size_mib * 2**20 // 4)
        for number in range(NUM_WARM_UP + num_rounds):
            for way, reduce in WAYS.items():
                time_s = seconds(reduce, tensor.fill_(1.0))
                if number >= NUM_WARM_UP:
                    times_s.setdefault((way, size_mib), []).append(time_s)
    return times_s


def seconds(reduce: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    """The time of one sum in this rank; all ranks start together."""
    dist.barrier()
    start_s = perf_counter()
    reduce(tensor)
    return perf_counter() - start_s


def rounds_s(num_ranks: int, num_rounds: int) -> dict[tuple[str, int], list[float]]:
    """The seconds of each round by way and size; a round lasts as long as its slowest rank."""
    ranks = run(measure, num_ranks, num_rounds, timeout_s=600)
    return {
        key: list(map(max, zip(*(times_s[key] for times_s in ranks), strict=True)))
        for key in ranks[0]
    }


def line(num_ranks: int, size_mib: int, times_s: dict[str, list[float]]) -> str:
    """One row of the table."""
    halfway_ms = {way: median(times) * 1e3 for way, times in times_s.items()}
    quick_ms = {way: quantiles(times, n=10)[0] * 1e3 for way, times in times_s.items()}
    cells = [f"{num_ranks}  {size_mib:>4}"]
    for taken_ms in halfway_ms, quick_ms:
        ratio = taken_ms["ring"] / taken_ms["gloo"]
        is_met = "met" if ratio <= AIM else "not met"
        cells += [f"{taken_ms[way]:>8.2f}" for way in WAYS]
        cells.append(f"{ratio:>7.2f}  {f'<= {AIM:g} {is_met}':<14}")
    return "  ".join(cells).rstrip()


def main() -> None:
    """Measure every size and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="sums of each size (50)")
    num_rounds = parser.parse_args().rounds
    print(
        f"float32, N processes on this machine, one thread each; milliseconds of {num_rounds} "
        "rounds in which both take turns;\na round lasts as long as its slowest rank. Where cores "
        "are shared with others, the tenth tells more.\n"
    )
    names = f"{'gloo':>8}  {'ring':>8}  of gloo  {'aim':<14}"
    print(f"{'':7}  {'the median round':<43}  a tenth of the rounds are as fast as")
    print(f"N   MiB  {names}  {names}".rstrip())
    for num_ranks in NUM_RANKS:
        times_s = rounds_s(num_ranks, num_rounds)
        for size_mib in SIZES_MIB:
            print(line(num_ranks, size_mib, {way: times_s[way, size_mib] for way in WAYS}))


if __name__ == "__main__":
    main()
