"""Says whether pipelines work on this machine, and how fast its links are."""

import os
import platform
from collections.abc import Iterator, Sequence
from itertools import permutations
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gpipe import GPipe, __version__
from gpipe.errors import GpipeError
from gpipe.profiling import link_bytes_per_s
from gpipe.stage.device import HOST, Device, default_devices, device_of, runtime_versions
from gpipe.units import show_bytes

__all__ = ["compare", "examine"]

TOLERANCE = 1e-5  # single precision, since not every accelerator has a double one
ROWS, WIDTH, CHUNKS = 8, 16, 4


def examine() -> Iterator[str]:
    """What there is and what works, line by line; some of them take a second.

    Raises:
        GpipeError: A pipeline gives other gradients than the plain model here, or none.
    """
    devices = [device_of(each) for each in default_devices()]
    yield from _versions()
    yield from (_described(device) for device in (device_of(HOST), *devices))
    yield from _links([device_of(HOST), *devices])
    pair = [device.torch_device for device in (devices or [device_of(HOST)])[:2]]
    places = [pair[0], pair[-1]]
    difference = compare(places)
    named = " and ".join(map(str, dict.fromkeys(places)))
    if not difference <= TOLERANCE:
        raise GpipeError(
            f"Two stages on {named} give gradients that differ from the plain model's by "
            f"{difference:.1e} of the largest. Report this with the lines above, and train on "
            "other devices meanwhile."
        )
    yield (
        f"two stages on {named}: the plain model's gradients, by backward() and by step(); largest "
        f"relative difference {difference:.0e}"
    )


def compare(places: Sequence[torch.device]) -> float:
    """The largest relative difference of any gradient from the plain model's.

    Args:
        places: The devices of the stages, one each. The plain model is on the first.
    """
    plain, module = _model().to(places[0]), _model()
    balance = [len(module) // len(places)] * len(places)
    model = GPipe(module, balance, CHUNKS, devices=places)
    generator = torch.Generator(HOST).manual_seed(1)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, device=HOST)
    torch.autograd.backward(mse_loss(plain(x.to(places[0])), y.to(places[0])))
    worst = 0.0
    for by_step in (False, True):
        model.zero_grad()
        if by_step:
            model.step(x, y, mse_loss)
        else:
            torch.autograd.backward(mse_loss(model(x), y.to(places[-1])))
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        worst = max(worst, *(_difference(mine.grad, its.grad) for mine, its in pairs))
    return worst


def _versions() -> Iterator[str]:
    runtimes = "".join(f", {name} {version}" for name, version in runtime_versions().items())
    system = f"{platform.system()} {platform.machine()}"
    yield (
        f"gpipe {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
        f"{runtimes}, {system}"
    )
    backends = [name for name in ("gloo", "nccl", "xccl", "mpi") if dist.is_backend_available(name)]
    yield f"torch.distributed: {', '.join(backends) or 'not in this build of torch'}"


def _described(device: Device) -> str:
    if device.torch_device == HOST:
        total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return f"{HOST}: {os.cpu_count()} cores, {show_bytes(total_bytes)} of memory"
    memory = device.memory()
    sizes = (
        f", {show_bytes(memory.total_bytes)} of memory, {show_bytes(memory.free_bytes)} free"
        if memory
        else ""
    )
    return f"{device.torch_device}: {device.product or 'an accelerator'}{sizes}"


def _links(devices: Sequence[Device]) -> Iterator[str]:
    host = devices[0]
    for source, target in list(permutations(devices, 2)) or [(host, host)]:
        try:
            speed = f"{show_bytes(link_bytes_per_s(source, target))}/s"
        except RuntimeError as error:
            speed = f"not measured ({str(error).splitlines()[0]})"
        direct = {True: ", directly", False: ", through the host", None: ""}
        way = direct[source.reaches(target)]
        yield f"{source.torch_device} to {target.torch_device}: {speed}{way}"


def _model() -> nn.Sequential:
    # Where the caller's generators stand must not change: `torch.manual_seed` moves all of them.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        return nn.Sequential(*layers)


def _difference(mine: Tensor | None, its: Tensor | None) -> float:
    if mine is None or its is None:
        return inf
    difference = (mine.to(HOST) - its.to(HOST)).abs().max() / its.to(HOST).abs().max()
    return float(difference) if difference.isfinite() else inf
