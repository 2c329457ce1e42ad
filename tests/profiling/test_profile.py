"""What a profile says of each layer, and of models that are hard to profile."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe.costs import Size
from gpipe.profiling import profile, profile_memory
from tests.profiling.members import Flat, Nested, Pops, Stashes, over_all_ways, quick_profile


def test_the_bytes_of_each_layer():
    frozen = nn.Linear(6, 4).requires_grad_(False)
    module = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), frozen, nn.ReLU())
    costs = profile_memory(module, torch.rand(10, 8))
    assert costs.names == ("0", "1", "2", "3")
    assert (costs.rows, costs.dtype, costs.device) == (10, "float32", "cpu")
    assert costs.parameter_bytes == (54 * 4, 12 * 4, 28 * 4, 0)
    assert costs.gradient_bytes == (54 * 4, 12 * 4, 0, 0)
    assert costs.buffer_bytes == (0, 12 * 4 + 8, 0, 0)
    assert costs.output_bytes_per_row == (24, 24, 16, 16)
    assert costs.saved_bytes_per_row == (32, 24, 0, 16)
    assert costs.memory.saved_sizes[1] == Size(2 * 24, 24)  # the mean and deviation of the batch
    assert costs.forward_s == costs.backward_s == (0, 0, 0, 0)
    assert costs.forward_flops_per_row is costs.backward_flops_per_row is None


@over_all_ways
def test_names_are_those_of_the_sequential(measure):
    module = nn.Sequential()
    module.add_module("first", nn.Linear(2, 2))
    module.add_module("last", nn.Tanh())
    assert measure(module, torch.rand(4, 2)).names == ("first", "last")


@over_all_ways
def test_integers_skips_nestings_and_none(measure):
    module = nn.Sequential(
        nn.Embedding(10, 6), Stashes(6), Nested(), Flat(), Pops(), nn.Linear(6, 3)
    )
    costs = measure(module, torch.arange(8))
    first, *_ = costs.memory.boundaries
    assert [tensor.size.bytes_per_row for tensor in first] == [8]
    nested = costs.memory.boundaries[3]
    assert [tensor.size.bytes_per_row for tensor in nested] == [24, 6, 24]
    early, nothing = costs.memory.skips
    assert (early.name, early.stash_layer, early.pop_layer) == ("early", 1, 4)
    assert [tensor.size.bytes_per_row for tensor in early.tensors] == [24]
    assert nothing.tensors == ()
    stages = costs.stage_costs([2, 2, 2], 4)
    assert stages.skip_bytes == {(0, 2): 4 * 24}
    assert stages.input_bytes == (4 * 8, 4 * 24, 4 * (24 + 24))


@over_all_ways
def test_a_constant_is_no_activation(measure):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.constant = torch.rand(6)
            self.register_buffer("buffer", torch.rand(6))

        def forward(self, input: Tensor) -> Tensor:
            return input * self.constant * self.buffer

    module = nn.Sequential(nn.Linear(6, 6), Scaled())
    assert measure(module, torch.rand(8, 6)).memory.saved_sizes == (Size(0, 24), Size(0, 0))


def test_what_was_saved_for_nothing_is_not_held():
    class Forgets(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            input.exp().tanh()
            return input + 1

    module = nn.Sequential(nn.Linear(6, 6), Forgets())
    assert profile_memory(module, torch.rand(8, 6)).saved_bytes_per_row == (24, 0)


def test_sizes_that_do_not_grow_in_a_line_are_taken_for_proportional():
    class Pairs(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return (input @ input.T).exp() @ input

    class ByRows(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return input.exp() if len(input) < 8 else input.exp().tanh().exp()

    (size,) = profile_memory(nn.Sequential(Pairs()), rows(8)).memory.saved_sizes
    assert size == Size(0, 24 + 8 * 4)
    (size,) = profile_memory(nn.Sequential(ByRows()), rows(8)).memory.saved_sizes
    assert size == Size(0, 3 * 24)


def rows(num_rows: int) -> Tensor:
    return torch.rand(num_rows, 6, requires_grad=True)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7])
def test_any_number_of_rows(num_rows):
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    costs = profile_memory(module, torch.rand(num_rows, 6))
    assert costs.rows == num_rows
    assert costs.saved_bytes_per_row == (24, 24, 0)


def test_split_is_that_of_gpipe():
    class Both(nn.Module):
        def forward(self, given: dict[str, Tensor]) -> Tensor:
            return given["rows"].T * given["whole"]

    sample = {"rows": torch.rand(6, 8), "whole": torch.rand(6, requires_grad=True)}
    costs = profile_memory(nn.Sequential(Both()), sample, split={"rows": 1, "whole": None})
    assert costs.rows == 8
    assert [tensor.size for tensor in costs.memory.boundaries[0]] == [Size(0, 24), Size(24, 0)]


def test_an_input_that_is_written_into_is_told():
    module = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))
    costs = profile_memory(module, torch.rand(8, 6))
    (tensor,) = costs.memory.boundaries[1]
    assert costs.memory.written == ((), (tensor.storage,), ())
    # Where a stage begins with it, it is given a copy, which is held beside what was received.
    assert costs.stage_costs([1, 2], 1).held_bytes == (24, 48)
    assert costs.stage_costs([2, 1], 1).held_bytes == (48, 24)


@over_all_ways
def test_under_autocast(measure):
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with torch.autocast("cpu", torch.bfloat16):
        costs = measure(module, torch.rand(8, 6))
    assert costs.output_bytes_per_row == (12, 12)


@over_all_ways
def test_a_loss_is_a_part_of_the_last_layer(measure):
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 10))
    options = {"target": torch.arange(8), "loss_fn": functional.cross_entropy}
    with_loss, without = measure(module, rows(8), **options), measure(module, rows(8))
    assert with_loss.saved_bytes_per_row == (24, 24 + 40 + 8)  # log-probabilities and targets
    assert without.saved_bytes_per_row == (24, 24)


@pytest.mark.parametrize("measure", [profile, profile_memory])
def test_tensors_without_values_are_refused(measure):
    module, sample = nn.Sequential(nn.Linear(6, 6)), torch.rand(8, 6)
    with pytest.raises(ValueError, match=r"sample has tensors on the meta device.* profile_met"):
        measure(module, sample.to("meta"))
    with pytest.raises(ValueError, match="The model has tensors on the meta device"):
        measure(module.to("meta"), sample)


@over_all_ways
def test_wrong_arguments(measure):
    module = nn.Sequential(nn.Linear(6, 6))
    with pytest.raises(TypeError, match=r"not an nn\.Sequential"):
        measure(nn.Linear(6, 6), torch.rand(4, 6))
    with pytest.raises(ValueError, match=r"0 rows\. Pass at least one"):
        measure(module, torch.rand(0, 6))
    with pytest.raises(ValueError, match="has 4 rows and tensor 1 of sample has 5"):
        measure(module, (torch.rand(4, 6), torch.rand(5, 6)))
    with pytest.raises(ValueError, match="sample has 4 rows and tensor 0 of target has 3"):
        measure(module, torch.rand(4, 6), target=torch.rand(3), loss_fn=functional.l1_loss)
    with pytest.raises(ValueError, match="not on this machine"):
        measure(module, torch.rand(4, 6), device="cuda:99")
    with pytest.raises(ValueError, match="never popped"):
        measure(nn.Sequential(Stashes(6)), torch.rand(4, 6))


def test_wrong_numbers_of_threads():
    for wrong, error in ((0, ValueError), ("two", TypeError)):
        with pytest.raises(error, match="`num_threads` is"):
            quick_profile(nn.Sequential(nn.Tanh()), torch.rand(4, 6), num_threads=wrong)


class ToSparse(nn.Module):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, input: Tensor) -> Tensor:
        return input.to_sparse(layout=self.layout)


class TimesSparse(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return torch.sparse.mm(input, torch.ones(6, 6))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("measure", [quick_profile, profile_memory])
@pytest.mark.parametrize(
    ("layout", "part_sizes"),
    [
        (torch.sparse_coo, [Size(0, 2 * 6 * 8), Size(0, 6 * 4)]),
        (torch.sparse_csr, [Size(8, 8), Size(0, 6 * 8), Size(0, 6 * 4)]),
    ],
)
def test_sparse_tensors_between_layers_count_with_their_parts(measure, layout, part_sizes):
    module = nn.Sequential(nn.Linear(6, 6), ToSparse(layout), TimesSparse(), nn.Linear(6, 6))
    costs = measure(module, torch.ones(8, 6))
    assert [tensor.size for tensor in costs.memory.boundaries[2]] == part_sizes
    assert costs.stage_costs([2, 2], 8).boundary_bytes[0] == sum(each.at(8) for each in part_sizes)


@over_all_ways
def test_an_expanded_sample_stays_so(measure):
    seen = []

    class Looks(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(input.stride())
            return input * 2

    measure(nn.Sequential(Looks()), torch.rand(8, 1).expand(8, 6))
    measure(nn.Sequential(Looks()), torch.rand(8, 9)[:, :6])
    assert set(seen[:2]) == {(1, 0)}
    assert set(seen[-2:]) == {(9, 1)}
