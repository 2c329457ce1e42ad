"""On real accelerators: order between streams, no waiting, and what is left to the caller."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gpipe import GPipe
from gpipe.doctor import compare
from tests.gpu.devices import needs_accelerator, places
from tests.members import over_all_ways, train_once

pytestmark = [pytest.mark.gpu, needs_accelerator]

ROWS, WIDTH, CHUNKS = 32, 512, 8


def wide(num_layers: int = 8) -> nn.Sequential:
    """Enough work that a stream which does not wait would read what is not there yet."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))


def wrap(**kwargs: object) -> GPipe:
    return GPipe(wide(), [3, 3, 2], CHUNKS, devices=places(3), **kwargs)  # type: ignore[arg-type]


def new_streams(devices: list[torch.device]) -> list[torch.Stream]:
    return [torch.Stream(device) for device in dict.fromkeys(devices)]


def set_streams(streams: list[torch.Stream]) -> list[torch.Stream]:
    """Make these current; those that were."""
    before = [torch.accelerator.current_stream(stream.device) for stream in streams]
    index = torch.accelerator.current_device_index()
    for stream in streams:
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(index)
    return before


def plain_gradients(x: Tensor, y: Tensor) -> list[Tensor]:
    plain = wide().to(places(1)[0])
    mse_loss(plain(x.to(places(1)[0])), y.to(places(1)[0])).backward()
    return [parameter.grad.cpu() for parameter in plain.parameters()]


@over_all_ways
def test_pinned_memory_may_be_filled_again_after_the_call(face, schedule, checkpoint):
    model = wrap(schedule=schedule, checkpoint=checkpoint)
    torch.manual_seed(1)
    first, target = torch.randn(2, ROWS, WIDTH)
    expected = plain_gradients(first, target)
    x, y = torch.empty(ROWS, WIDTH).pin_memory(), torch.empty(ROWS, WIDTH).pin_memory()
    for _ in range(5):
        x.copy_(first)
        y.copy_(target)
        train_once(model, face, x, y if face == "step" else y.to(model.devices[-1]), mse_loss)
        x.fill_(float("nan"))
        y.fill_(float("nan"))
        for parameter, its in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.cpu(), its)
            parameter.grad = None


@over_all_ways
def test_it_runs_under_any_streams_of_the_caller(face, schedule, checkpoint):
    model = wrap(schedule=schedule, checkpoint=checkpoint)
    torch.manual_seed(1)
    x, y = torch.randn(2, ROWS, WIDTH)
    expected = plain_gradients(x, y)
    for _ in range(3):
        streams = new_streams(model.devices)
        torch.accelerator.synchronize()
        before = set_streams(streams)
        try:
            current = [torch.accelerator.current_stream(stream.device) for stream in streams]
            index = torch.accelerator.current_device_index()
            # Made here, in the order of these streams alone.
            mine, target = x.to(model.devices[0]) * 1, y.to(model.devices[-1]) * 1
            train_once(model, face, mine, target, mse_loss)
            assert torch.accelerator.current_device_index() == index
            assert current == [torch.accelerator.current_stream(s.device) for s in streams]
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
            del mine, target
            torch.empty(ROWS, WIDTH, device=model.devices[0]).fill_(float("nan"))
            found = [gradient.cpu() for gradient in gradients]
        finally:
            set_streams(before)
        for gradient, its in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, its)


# torch says that it has to order the two; it does.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_backward_may_run_under_other_streams_than_the_forward():
    model = wrap()
    torch.manual_seed(1)
    x, y = torch.randn(2, ROWS, WIDTH)
    expected = plain_gradients(x, y)
    for _ in range(3):
        early, late = new_streams(model.devices), new_streams(model.devices)
        torch.accelerator.synchronize()
        before = set_streams(early)
        loss = mse_loss(model(x.to(model.devices[0])), y.to(model.devices[-1]))
        for mine, other in zip(late, early, strict=True):
            mine.wait_stream(other)
        set_streams(late)
        loss.backward()
        found = [parameter.grad.cpu() for parameter in model.parameters()]
        set_streams(before)
        model.zero_grad()
        for gradient, its in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, its)


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_the_host_waits_for_nothing_in_a_step(schedule, checkpoint):
    if places(1)[0].type != "cuda":
        pytest.skip("only CUDA tells when the host waits")
    model = wrap(schedule=schedule, checkpoint=checkpoint)
    x = torch.randn(ROWS, WIDTH, device=model.devices[0])
    y = torch.randn(ROWS, WIDTH, device=model.devices[-1])
    for _ in range(2):  # in which recomputes are looked at
        model.step(x, y, mse_loss)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = model.step(x, y, mse_loss)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert result.loss.isfinite()


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_the_timeline_is_that_of_the_devices(schedule):
    model = wrap(schedule=schedule, checkpoint="always")
    x, y = torch.randn(2, ROWS, WIDTH)
    for _ in range(3):
        timeline = model.step(x, y, mse_loss).timeline
    order = model._layout.orders.of_step(CHUNKS, "always")
    assert timeline.rows == order.rows
    for worker in range(3):
        events = [event for event in timeline.events if event.worker == worker]
        assert all(event.end_s >= event.start_s for event in events)
        assert all(b.start_s >= a.start_s for a, b in pairwise(events))
    assert 0 < timeline.makespan_s < 60


def test_a_stage_without_memory_says_what_would_help():
    class Greedy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.empty(2**50, dtype=torch.uint8, device=x.device)[:1]

    model = GPipe(nn.Sequential(*wide(2), Greedy()), [2, 1], CHUNKS, devices=places(2))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model.step(*torch.randn(2, ROWS, WIDTH), mse_loss)
    place, note = caught.value.__notes__
    assert "stage 1, layer 2 ('2', Greedy), micro-batch 0, forward" in place
    assert "in use" in note
    assert "Raise chunks" in note


def test_steps_leave_no_memory_behind():
    model = wrap()
    x, y = torch.randn(2, ROWS, WIDTH)
    used = []
    for _ in range(20):
        model.step(x, y, mse_loss)
        model.zero_grad()
        torch.accelerator.synchronize()
        used.append([torch.accelerator.memory_allocated(device) for device in model.devices])
    assert used[-1] == used[4]


def test_the_doctor_finds_nothing():
    assert compare(places(2)) <= 1e-5
