"""The devices on which the engine is tested: they compute right, and show what does not wait."""

import copy
import sys
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.accelerator import current_stream
from torch.nn.functional import cross_entropy, embedding
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from tests.accelerator.backend import needs_compiler, run_alone, run_here

HERE, THERE = "deferred:0", "deferred:1"
ORDERS = [("eager", 0), ("lazy", 0), *(("random", seed) for seed in range(20))]


def text() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    ends = (nn.LayerNorm(8), nn.Flatten(0, 1), nn.Softmax(-1))
    return nn.Sequential(nn.Embedding(11, 8), layer, *ends)


def image() -> nn.Module:
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, bias=False))
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 8))


def trained(device: str, module: nn.Module, x: Tensor, y: Tensor, optimizer: type) -> list[Tensor]:
    """The state after three steps, and what comes out then."""
    module, x, y = copy.deepcopy(module).to(device), x.to(device), y.to(device)
    steps = optimizer(module.parameters(), lr=0.01)
    for _ in range(3):
        cross_entropy(module(x), y).backward()
        steps.step()
        steps.zero_grad()
    with torch.no_grad():
        return [each.cpu() for each in (*module.state_dict().values(), module.eval()(x))]


def computes_like_the_cpu() -> None:
    torch.set_default_dtype(torch.double)  # Adam magnifies the rounding of a gradient that is zero
    for order, optimizer in product(ORDERS[:4], (torch.optim.SGD, torch.optim.AdamW)):
        torch.ops.deferred.set_policy(*order)
        texts = (text(), torch.randint(11, (4, 5)), torch.randint(8, (20,)))
        images = (image(), torch.randn(4, 3, 8, 8), torch.randint(8, (4,)))
        for case in (texts, images):
            assert_close(trained(HERE, *case, optimizer), trained("cpu", *case, optimizer))
    assert not torch.ops.deferred.take_reports()


def draws() -> None:
    x = torch.ones(50, 50, device=HERE, requires_grad=True)
    dropped = checkpoint(nn.Dropout(0.5), x, use_reentrant=False)
    dropped.sum().backward()
    assert torch.equal(x.grad, dropped)
    assert dropped.unique().tolist() == [0, 2]
    state = torch.deferred.get_rng_state(HERE)
    drawn = torch.rand(3, device=HERE)
    assert not torch.equal(torch.rand(3, device=HERE), drawn)
    torch.deferred.set_rng_state(state, HERE)
    assert torch.equal(torch.rand(3, device=HERE), drawn)


def tells_devices_apart() -> None:
    torch.ops.deferred.set_policy("lazy", 0)
    with torch.Stream(THERE) as side:
        assert torch.accelerator.current_device_index() == 1
        assert current_stream() == current_stream(THERE) == side != current_stream(HERE)
    x, index = torch.randn(4, 3, device=HERE), torch.tensor([9], device=HERE)
    assert torch.accelerator.memory_allocated(HERE) == 4 * 3 * 4 + 8
    with pytest.raises(RuntimeError, match="deferred:0 and deferred:1"):
        x + x.to(THERE)
    start, end = (torch.Event(HERE, enable_timing=True) for _ in range(2))
    start.record()
    embedding(index, x)
    end.record()
    assert not end.query()
    with pytest.raises(RuntimeError, match="index_select on stream 0 of device 0: index out of"):
        end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) > 0
    with pytest.raises(RuntimeError, match="event of device 0 cannot be recorded"):
        end.record(side)


def numbers() -> Tensor:
    return torch.arange(5.0, device=HERE) + 1


def are(x: Tensor, factor: int) -> bool:
    return torch.equal(x.cpu(), factor * torch.arange(1.0, 6))


def behind(waits: bool, device: str = HERE) -> torch.Stream:
    """A new stream, which waits for the current one or does not."""
    side = torch.Stream(device)
    if waits:
        side.wait_event(current_stream(device).record_event())
    return side


def read_after_write(waits: bool) -> bool:
    x = numbers()
    with behind(waits):
        return are(x * 2, 2)


def write_after_read(waits: bool) -> bool:
    x = numbers()
    current_stream(HERE).synchronize()
    y = x * 2
    with behind(waits) as side:
        x.zero_()
    side.synchronize()
    return are(y, 2)


def free_after_use(waits: bool) -> bool:
    x = numbers()
    with behind(True) as side:
        y = x * 2
    if waits:
        x.record_stream(side)
    del x
    current_stream(HERE).synchronize()
    with side:
        return are(y, 2)


def read_after_copy(waits: bool) -> bool:
    x = numbers().to(THERE)
    with behind(waits, THERE):
        return are(x * 2, 2)


def host_reads_after_copy(waits: bool) -> bool:
    x = numbers().to("cpu", non_blocking=True)
    if waits:
        current_stream(HERE).synchronize()
    return are(x, 1)


def host_writes_after_copy(waits: bool) -> bool:
    x = numbers().cpu().pin_memory()
    y = x.to(HERE, non_blocking=True)
    if waits:
        current_stream(HERE).synchronize()
    x.zero_()
    return are(y, 1)


def shows_what_does_not_wait() -> None:
    on_device = (read_after_write, write_after_read, free_after_use, read_after_copy)
    for case in (*on_device, host_reads_after_copy, host_writes_after_copy):
        for order in ORDERS:
            torch.ops.deferred.set_policy(*order)
            assert case(waits=True), (case, order)
            assert not torch.ops.deferred.take_reports()
        torch.ops.deferred.set_policy("lazy", 0)
        assert not case(waits=False), case
        torch.ops.deferred.set_policy("eager", 0)
        case(waits=False)
        assert len(torch.ops.deferred.take_reports()) == (case in on_device), case


CHECKS = ("computes_like_the_cpu", "draws", "tells_devices_apart", "shows_what_does_not_wait")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_backend(check):
    run_alone("tests.accelerator.test_backend", check)


if __name__ == "__main__":
    run_here(globals()[sys.argv[1]])
