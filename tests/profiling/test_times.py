"""Times, by a clock that the layers themselves move on."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gpipe.profiling import profile, timing
from gpipe.profiling.timing import Timing
from gpipe.stage.device import HOST, Device

MAX_REPEATS = 20


class Clock:
    """Stands still, but for what layers take."""

    now_s = 0.0

    def __call__(self, *_: object) -> float:
        return self.now_s

    def run(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock():
    clock = Clock()
    with (
        mock.patch.object(timing, "perf_counter", clock),
        mock.patch.object(timing, "MAX_REPEATS", MAX_REPEATS),
        mock.patch.object(Device, "moment", clock),
    ):
        yield clock


class Tick(torch.autograd.Function):
    """Lets the backward take its time."""

    @staticmethod
    def forward(ctx, input: Tensor, layer: "Takes") -> Tensor:
        ctx.layer = layer
        return input.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.tick(ctx.layer.backward_s, len(gradient))
        return gradient, None


class Takes(nn.Module):
    """Takes seconds: a fixed part and a part per row."""

    def __init__(self, clock: Clock, forward_s, backward_s) -> None:
        super().__init__()
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s

    def forward(self, input: Tensor) -> Tensor:
        self.tick(self.forward_s, len(input))
        return Tick.apply(input, self)

    def tick(self, parts_s: tuple[float, float], rows: int) -> None:
        fixed_s, per_row_s = parts_s
        self.clock.run(fixed_s + per_row_s * rows)


class SlowAtFirst(nn.Module):
    """Takes much longer the first time that it sees a number of rows."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.seen = clock, set()

    def forward(self, input: Tensor) -> Tensor:
        self.clock.run(1.0 if len(input) in self.seen else 1000.0)
        self.seen.add(len(input))
        return input * 2


SAMPLE = torch.ones(8, 2, requires_grad=True)


def test_medians_and_their_fixed_parts(clock):
    module = nn.Sequential(Takes(clock, (2, 1), (3, 0)), Takes(clock, (0, 0.5), (0, 4)))
    costs = profile(module, SAMPLE, time_budget_s=1e6)
    assert costs.forward_s == (10, 4)
    assert costs.backward_s == (3, 32)
    assert costs.forward_fixed_s == (2, 0)
    assert costs.backward_fixed_s == (3, 0)
    assert costs.is_proportional == (False, False)
    two = costs.stage_costs([2], 2)
    assert (two.forward_s, two.backward_s) == ((2 + 2 + 1,), (3 + 8,))


def test_the_first_layer_is_not_charged_for_its_warm_up(clock):
    module = nn.Sequential(SlowAtFirst(clock), SlowAtFirst(clock))
    for time_budget_s in (0.0, 1e6):
        costs = profile(module, SAMPLE, time_budget_s=time_budget_s)
        assert costs.forward_s == (1, 1)


def test_without_time_for_a_second_number_of_rows_times_are_proportional(clock):
    module = nn.Sequential(Takes(clock, (2, 1), (3, 0)))
    costs = profile(module, SAMPLE, time_budget_s=0.0)
    assert (costs.forward_s, costs.backward_s) == ((10,), (3,))
    assert costs.forward_fixed_s == costs.backward_fixed_s == (0,)
    assert costs.is_proportional == (True,)
    assert costs.stage_costs([1], 4).forward_s == (5,)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows_are_not_halved(clock, rows):
    module = nn.Sequential(Takes(clock, (2, 1), (3, 0)), nn.BatchNorm1d(2).eval())
    costs = profile(module, SAMPLE[:rows].detach(), time_budget_s=1e6)
    assert costs.rows == rows
    assert costs.is_proportional == (True, True)
    assert costs.forward_s[0] == 2 + rows


def test_each_layer_gets_its_share_of_what_is_left_of_the_budget(clock):
    slow, *quick = [Takes(clock, (seconds, 0), (0, 0)) for seconds in (10, 1, 1)]
    profile(nn.Sequential(slow, *quick), SAMPLE, time_budget_s=100)
    assert 100 <= clock.now_s <= 100 + 2 * 10  # the last repeats began in time
    clock.now_s = 0
    profile(nn.Sequential(*quick), SAMPLE, time_budget_s=1e6)
    repeats = 2 * (2 * MAX_REPEATS - 1) + 4 + 4  # less one with half of the rows; warm-ups; memory
    assert clock.now_s == repeats


def test_a_frozen_start_has_no_backward(clock):
    frozen = nn.Linear(2, 2).requires_grad_(False)
    module = nn.Sequential(frozen, Takes(clock, (1, 0), (5, 0)), nn.Linear(2, 2))
    costs = profile(module, SAMPLE.detach(), time_budget_s=0.0)
    assert costs.backward_s == (0, 0, 0)
    costs = profile(module, SAMPLE, time_budget_s=0.0)
    assert costs.backward_s == (0, 5, 0)


def test_the_loss_counts_as_part_of_the_last_layer(clock):
    loss = Takes(clock, (7, 0), (2, 0))
    module = nn.Sequential(nn.Tanh(), Takes(clock, (1, 0), (1, 0)))
    costs = profile(
        module,
        SAMPLE,
        target=torch.ones(8),
        loss_fn=lambda output, target: (loss(output).sum(1) - target).sum(),
        time_budget_s=0.0,
    )
    assert costs.forward_s == (0, 8)
    assert costs.backward_s == (0, 3)


class Elsewhere(Device):
    """A device whose moments are not seconds of the host; looking at its clock takes 3 s."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.now_s = 0

    def moment(self) -> str:
        self.now_s += 3
        return f"at {self.now_s}"

    def seconds(self, moments: list[str]) -> list[float]:
        return [float(moment.removeprefix("at ")) for moment in moments]


class Ticks:
    """An attempt that takes 5 s forward and 7 s backward on a device."""

    def __init__(self, device: Elsewhere) -> None:
        self.device = device

    def forward(self) -> None:
        self.device.now_s += 5

    def prepare_backward(self) -> None: ...

    def backward(self) -> None:
        self.device.now_s += 7


def test_times_are_those_of_the_device_without_what_measuring_takes():
    device = Elsewhere()
    times = Timing(1, (8, 8), device, 0.0).measure([lambda: Ticks(device)] * 2)
    assert times == (5, 7, 0, 0, True)


def test_the_share_of_threads_is_taken_and_given_back():
    seen = []

    class Looks(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            return input

    before = torch.get_num_threads()
    costs = profile(nn.Sequential(Looks()), SAMPLE, num_threads=before + 1, time_budget_s=0.0)
    assert set(seen) == {before + 1}
    assert costs.num_threads == before + 1
    assert torch.get_num_threads() == before


def test_a_bar_shows_how_many_layers_are_done(capsys):
    profile(nn.Sequential(nn.Tanh(), nn.Tanh()), SAMPLE, time_budget_s=0.0, progress=True)
    assert "profile: " in capsys.readouterr().err
    profile(nn.Sequential(nn.Tanh(), nn.Tanh()), SAMPLE, time_budget_s=0.0)
    assert capsys.readouterr().err == ""
