"""Law 9: the running statistics are those of the un-split mini-batch."""

import copy

import pytest
import torch
from torch import nn

from gpipe.stage.batchnorm import (
    Collector,
    defer_batch_norm,
)
from tests.stage.norms import (
    FEATURES,
    SHAPES,
    SPLITS,
    assert_close,
    assert_unchanged,
    buffers,
    data,
    deferred,
    lively,
    observe,
    train,
)


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, None])
def test_the_statistics_are_those_of_the_unsplit_minibatch(momentum, affine, shape, sizes):
    kind, dims = SHAPES[shape]
    plain = lively(kind(FEATURES, momentum=momentum, affine=affine))
    ours = deferred(plain)
    for scale in (1, 5, 0.1):
        x = data(dims) * scale
        plain(x)
        train(ours, x.split(sizes))
        assert_close(ours, plain)


# ---- CASES 19 and 20, with their numbers ----


def test_two_slices_count_as_one_batch():
    norm = deferred(nn.BatchNorm1d(1, momentum=0.1))
    train(norm, torch.tensor([[1.0], [2.0], [3.0], [4.0]]).chunk(2))
    assert norm.running_mean.item() == pytest.approx(0.25)
    assert norm.running_var.item() == pytest.approx(1.066667, abs=1e-6)
    assert norm.num_batches_tracked.item() == 1


def test_a_small_minibatch_is_complete_and_leaks_nothing_into_the_next():
    # A layer that counts calls up to `chunks` would take the next mini-batch for the rest of this.
    norm = deferred(nn.BatchNorm1d(1, momentum=0.1))
    train(norm, torch.full((3, 1), 5.0).split(1))
    assert norm.running_mean.item() == pytest.approx(0.5)
    train(norm, torch.zeros(4, 1).split(1))
    assert norm.running_mean.item() == pytest.approx(0.45)
    assert norm.num_batches_tracked.item() == 2


# ---- one value per channel ----


@pytest.mark.parametrize("shape", SHAPES)
def test_one_value_per_channel_in_the_whole_minibatch_is_torchs_error(shape):
    kind, dims = SHAPES[shape]
    x = torch.ones(1, FEATURES, *[1] * (len(dims) - 1))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as torchs:
        kind(FEATURES)(x)

    model = nn.Sequential(nn.BatchNorm1d(FEATURES), kind(FEATURES))
    collector = Collector(defer_batch_norm([model]))
    observe(model[0], torch.ones(2, FEATURES).split(1), collector)
    observe(model[1], [x], collector)
    before = buffers(model)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as ours:
        collector.check()
    assert str(ours.value) == str(torchs.value)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        collector.commit()
    assert_unchanged(model, before)  # not even the norm that could have been updated


def test_a_microbatch_of_one_value_is_normalised_to_the_bias():
    norm = lively(nn.BatchNorm1d(FEATURES))
    ours = deferred(norm)
    x = data((FEATURES,), rows=1).requires_grad_()
    (output,) = observe(ours, [x], Collector([ours]))
    output.sum().backward()
    torch.testing.assert_close(output, norm.bias.expand(1, FEATURES))
    torch.testing.assert_close(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("sizes", [[0, 2, 2], [2, 0, 2], [2, 2, 0], [1, 0, 0, 3], [4, 0], [0, 0]])
def test_an_empty_microbatch_says_nothing(sizes):
    # A layer may choose rows, and none of one micro-batch.
    plain = lively(nn.BatchNorm1d(FEATURES, momentum=None))
    ours = deferred(plain)
    x = data((FEATURES,), rows=sum(sizes))
    plain(x)
    train(ours, x.split(sizes))
    assert_close(ours, plain)


# ---- precision ----


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [(torch.float64, 1e-9, 1e-10), (torch.float32, 5e-3, 1e-3)],  # 1e-3: the next number to 10⁴
    ids=str,
)
@pytest.mark.parametrize("num_microbatches", [1, 7, 2000])
def test_a_small_spread_around_a_large_mean(num_microbatches, dtype, rtol, atol):
    # The mean of the squares less the square of the mean would leave nothing of the variance in
    # single precision; 2000 means near 10⁴, merged one by one, an error as large as the spread.
    torch.manual_seed(0)
    x = (1e4 + 1e-2 * torch.randn(4000, 4, dtype=torch.float64)).to(dtype)
    truth = x.double().var(0), x.double().mean(0)
    norm = deferred(nn.BatchNorm1d(4, momentum=1.0, dtype=dtype))
    train(norm, [x[:0], *x.tensor_split(num_microbatches)])
    torch.testing.assert_close(norm.running_var.double(), truth[0], rtol=rtol, atol=0)
    torch.testing.assert_close(norm.running_mean.double(), truth[1], rtol=0, atol=atol)


def test_microbatches_with_means_of_their_own():
    # Sorted rows: nearly all of the variance lies between the micro-batches.
    x = torch.linspace(-1e3, 1e3, 1000, dtype=torch.float64).unsqueeze(1).repeat(1, 2)
    norm = deferred(nn.BatchNorm1d(2, momentum=1.0).double())
    train(norm, x.tensor_split(300))
    torch.testing.assert_close(norm.running_var, x.var(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(norm.running_mean, x.mean(0), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("whole_module", [True, False])
def test_half_precision_keeps_moments_in_single(whole_module, dtype):
    plain = lively(nn.BatchNorm1d(FEATURES)).float()
    ours = deferred(plain)
    if whole_module:
        plain.to(dtype)
        ours.to(dtype)
    pointers = [buffer.data_ptr() for buffer in ours.buffers()]
    x = data((FEATURES,), rows=400).to(dtype)
    single = copy.deepcopy(plain).float()
    single(x.float())
    collector = Collector([ours])
    outputs = observe(ours, x.split(100), collector)
    moments = next(iter(collector._moments[ours].values()))[0]
    collector.commit()

    assert outputs[0].dtype == dtype
    assert torch.equal(outputs[0], copy.deepcopy(plain)(x[:100]))
    assert moments.mean.dtype == moments.deviations.dtype == torch.float32
    assert [buffer.data_ptr() for buffer in ours.buffers()] == pointers
    assert [buffer.dtype for buffer in ours.buffers()] == [b.dtype for b in plain.buffers()]
    rtol = torch.finfo(dtype).eps if whole_module else 1e-5
    for name, buffer in single.named_buffers():
        torch.testing.assert_close(
            getattr(ours, name).to(buffer.dtype), buffer, rtol=rtol, atol=1e-6
        )


def test_half_precision_survives_sums_that_it_cannot_hold():
    x = 60000 + 30 * torch.randint(-9, 9, (64, 1)).half()
    norm = deferred(nn.BatchNorm1d(1, momentum=1.0).half())
    train(norm, x.split(16))
    torch.testing.assert_close(norm.running_mean.float(), x.float().mean(0), rtol=1e-3, atol=0)
    torch.testing.assert_close(norm.running_var.float(), x.float().var(0), rtol=1e-3, atol=0)


def test_under_autocast():
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(5, FEATURES), nn.BatchNorm1d(FEATURES))
    ours = copy.deepcopy(plain)
    x = torch.randn(12, 5)
    collector = Collector(defer_batch_norm([ours]))
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x)
        (output,) = observe(ours, [x], collector)
        collector.commit()
    assert output.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(output, expected)
    assert_close(ours, plain, rtol=1e-6, atol=1e-6)
