"""What shapes alone tell."""

import pytest
import torch
from torch import Tensor, nn

from gpipe.costs import Size
from gpipe.models import transformer
from gpipe.profiling import WorkspaceWarning, flops, profile_memory, profile_meta, shapes


def test_operations_of_matrix_products():
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    costs = profile_meta(module, torch.rand(10, 8))
    assert costs.forward_flops_per_row == (2 * 8 * 16, 0, 2 * 16 * 4)
    # The first layer's input needs no gradient.
    assert costs.backward_flops_per_row == (2 * 8 * 16, 0, 2 * 2 * 16 * 4)
    assert costs.forward_s == (0, 0, 0)


def test_frozen_layers_have_no_operations_for_their_weights():
    frozen = nn.Linear(8, 8).requires_grad_(False)
    costs = profile_meta(nn.Sequential(nn.Linear(8, 8), frozen), torch.rand(4, 8))
    assert costs.backward_flops_per_row == (128, 128)


def test_operations_of_attention():
    module = transformer(1, 32, 4, 50)
    num_tokens = 24
    costs = profile_meta(module, torch.zeros(4, num_tokens, dtype=torch.int64), device="cpu")
    products = 2 * num_tokens * (4 * 32 * 32 + 2 * 32 * 128)
    attention = 2 * 2 * num_tokens**2 * 32
    assert costs.forward_flops_per_row == (0, products + attention, 2 * num_tokens * 32 * 50)
    # The fused kernel computes its scores again.
    assert costs.backward_flops_per_row[1] == 2 * products + attention * 5 / 2


def test_convolutions_and_parametrizations():
    module = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1)), nn.Flatten()
    )
    costs = profile_meta(module, torch.rand(4, 3, 8, 8))
    assert costs.forward_flops_per_row == (2 * 27 * 4 * 64, 0)


LENGTH, WIDTH, HIDDEN = 5, 6, 7


class First(nn.Module):
    """The output of a recurrent layer, without its state."""

    def __init__(self, recurrent: nn.RNNBase) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, input: Tensor) -> Tensor:
        return self.recurrent(input)[0]


@pytest.mark.filterwarnings("ignore::gpipe.profiling.WorkspaceWarning")
@pytest.mark.parametrize(("kind", "num_gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("directions", [1, 2])
def test_operations_of_recurrent_layers(kind, num_gates, directions):
    layer = kind(WIDTH, HIDDEN, num_layers=2, batch_first=True, bidirectional=directions == 2)
    sample = torch.rand(4, LENGTH, WIDTH, requires_grad=True)
    costs = profile_meta(nn.Sequential(First(layer)), sample, device="cpu")
    inputs = WIDTH + HIDDEN, directions * HIDDEN + HIDDEN
    forward = 2 * LENGTH * directions * num_gates * HIDDEN * sum(inputs)
    assert costs.forward_flops_per_row == (forward,)
    # Without a state that needs a gradient, the first step has none for it; oneDNN makes it.
    not_made = 2 * 2 * directions * num_gates * HIDDEN * HIDDEN
    (backward,) = costs.backward_flops_per_row
    assert 2 * forward - not_made <= backward <= 2 * forward


def test_operations_of_the_fused_recurrent_layers_of_accelerators():
    weights = [torch.Size(each) for each in [(28, 6), (28, 7), (28,), (28,)]]
    shape = torch.Size([5, 4, 6])
    formulas = flops.FORMULAS
    expected = 2 * 20 * (28 * 6 + 28 * 7)
    for name in ("_cudnn_rnn", "miopen_rnn"):
        forward = formulas[getattr(torch.ops.aten, name)]
        backward = formulas[getattr(torch.ops.aten, f"{name}_backward")]
        assert forward(shape, weights, 4, None, out_val=None) == expected
        assert backward(shape, weights, 4, None, out_val=None) == 2 * expected


def test_a_workspace_that_shapes_do_not_tell_is_told_of():
    module = nn.Sequential(nn.Tanh(), First(nn.LSTM(6, 6)), First(nn.GRU(6, 6)))
    sample = torch.rand(4, 3, 6, requires_grad=True)
    with pytest.warns(
        WorkspaceWarning, match=r"layer 1 \('1', First\).*Use profile_memory"
    ) as told:
        costs = profile_meta(module, sample, device="cpu")
    assert len(told) == 1
    real = profile_memory(module, sample, device="cpu").memory
    assert real.saved_sizes[1].at(4) > 2 * costs.memory.saved_sizes[1].at(4)


@pytest.mark.parametrize("of_model", ["cpu", "meta"])
@pytest.mark.parametrize("of_sample", ["cpu", "meta"])
def test_model_and_sample_may_be_anywhere(of_model, of_sample):
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())

    with torch.device(of_model):
        module = build()
    sample = torch.rand(4, 3, 8, 8)
    costs = profile_meta(module, sample.to(of_sample), device="cpu")
    assert costs.memory == profile_memory(build(), sample).memory
    assert costs.device == "cpu"
    assert all(parameter.device.type == of_model for parameter in module.parameters())


class Looks(nn.Module):
    """Takes views of a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.tables = torch.rand(3, 6), [torch.rand(2, 6)]

    def forward(self, input: Tensor) -> Tensor:
        return input * self.table[1] * self.tables[0][0]


def test_views_of_what_merely_hangs_on_a_layer_are_no_activations():
    module = nn.Sequential(nn.Linear(6, 6), Looks(), nn.Sequential(Looks(), nn.Tanh()))
    sample = torch.rand(8, 6)
    memory = profile_meta(module, sample, device="cpu").memory
    assert memory == profile_memory(module, sample, device="cpu").memory
    assert memory.saved_sizes == (Size(0, 24), Size(0, 0), Size(0, 24))


class Counted(nn.Linear):
    """A user's own layer."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        Counted.calls += 1
        return super().forward(input)


def visits(module: nn.Sequential, sample: Tensor, monkeypatch) -> int:
    """How many layers are really looked at."""
    measured = []
    flops = shapes._flops
    monkeypatch.setattr(shapes, "_flops", lambda trials: measured.append(1) or flops(trials))
    profile_meta(module, sample)
    return len(measured)


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("second", "num_visits"),
    [
        (lambda: nn.Linear(6, 6), 1),
        (lambda: nn.Linear(6, 6, bias=False), 2),
        (lambda: nn.Linear(6, 6).requires_grad_(False), 2),
        (lambda: nn.Linear(6, 6).eval(), 2),
        (lambda: nn.Linear(6, 6, dtype=torch.float64).float(), 1),
        (lambda: hooked(nn.Linear(6, 6)), 2),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), 2),
    ],
)
def test_equal_layers_of_torch_are_looked_at_once(second, num_visits, monkeypatch):
    module = nn.Sequential(nn.Linear(6, 6), second())
    assert visits(module, torch.rand(4, 6, requires_grad=True), monkeypatch) == num_visits


def test_other_inputs_are_looked_at_again(monkeypatch):
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    assert visits(module, torch.rand(4, 6), monkeypatch) == 2  # the first needs no gradient


def test_what_a_hook_of_all_modules_does_is_not_known(monkeypatch):
    module, sample = nn.Sequential(nn.Tanh(), nn.Tanh()), torch.rand(4, 6)
    assert visits(module, sample, monkeypatch) == 1
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert visits(module, sample, monkeypatch) == 2
    finally:
        hook.remove()


def test_layers_of_users_are_looked_at_each_time(monkeypatch):
    # What their forward does may follow from anything, here from how often it was called.
    module = nn.Sequential(*(Counted(6, 6) for _ in range(3)))
    assert visits(module, torch.rand(4, 6), monkeypatch) == 3


def test_remembered_layers_give_the_same_costs_as_visited_ones(monkeypatch):
    module = transformer(5, 32, 4, 50)
    sample = torch.zeros(4, 24, dtype=torch.int64)
    remembered = profile_meta(module, sample)
    monkeypatch.setattr(shapes, "likeness", lambda place: None)
    assert profile_meta(module, sample) == remembered


def test_the_blocks_of_a_transformer_are_looked_at_once(monkeypatch):
    with torch.device("meta"):
        module = transformer(103, 2048, 16, 32000)
        sample = torch.zeros(32, 1024, dtype=torch.int64)
    assert visits(module, sample, monkeypatch) == 3


def test_nothing_is_allocated():
    module = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 8))
    costs = profile_meta(module, torch.zeros(10**9, 1024, device="meta"))  # 4 TB
    assert costs.saved_bytes_per_row == (4096, 4096, 0)
