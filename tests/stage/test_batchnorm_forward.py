"""What a deferred norm computes, in a mini-batch and outside of one."""

import copy
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe.stage.batchnorm import (
    Collector,
    defer_batch_norm,
)
from tests.stage.norms import (
    FEATURES,
    SHAPES,
    assert_close,
    assert_unchanged,
    buffers,
    data,
    deferred,
    lively,
    observe,
    train,
)

# ---- the deferred forward itself ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_are_torchs_bit_for_bit(shape, affine, dtype):
    kind, dims = SHAPES[shape]
    plain = lively(kind(FEATURES, affine=affine)).to(dtype)
    ours = deferred(plain)
    collector = Collector([ours])
    x = data(dims).to(dtype)
    expected = results(plain, x)
    with collector.observing(0):
        observed = results(ours, x)
    with collector.replaying():
        replayed = results(ours, x)
    for kind_of_result in zip(expected, observed, replayed, strict=True):
        assert torch.equal(kind_of_result[0], kind_of_result[1])
        assert torch.equal(kind_of_result[0], kind_of_result[2])


def results(norm: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, the gradient of the input and those of the parameters."""
    norm.zero_grad()
    x = x.clone().requires_grad_()
    output = norm(x)
    output.square().mul(torch.arange(len(x)).view(-1, *[1] * (x.dim() - 1))).sum().backward()
    return [output.detach(), x.grad, *(parameter.grad.clone() for parameter in norm.parameters())]


def test_a_replay_repeats_and_records_nothing():
    ours = deferred(nn.BatchNorm1d(FEATURES).double())
    x = data((FEATURES,))
    collector = Collector([ours])
    before = buffers(ours)
    with collector.replaying():
        one_row = ours(x[:1])
        ours(x)
    assert_unchanged(ours, before)
    collector.commit()
    assert_unchanged(ours, before)
    torch.testing.assert_close(one_row, torch.zeros_like(one_row))


def test_a_layer_that_checkpoints_inside_counts_once():
    # Its own recompute comes in the backward, which the engine replays.
    plain = lively(nn.BatchNorm1d(FEATURES))
    ours = deferred(plain)
    x = data((FEATURES,)).requires_grad_()
    plain(x)
    collector = Collector([ours])
    pieces = observe(lambda x: checkpoint(ours, x, use_reentrant=False), x.split(4), collector)
    collector.commit()
    with collector.replaying():
        torch.cat(pieces).square().sum().backward()
    assert_close(ours, plain)


def test_a_commit_between_forward_and_backward_does_not_disturb_the_graph():
    ours = deferred(nn.BatchNorm1d(FEATURES).double())
    x = data((FEATURES,)).requires_grad_()
    collector = Collector([ours])
    pieces = observe(ours, x.split(4), collector)
    collector.commit()
    torch.cat(pieces).square().sum().backward()  # a write to a saved tensor would raise here


class Tag:
    """Lives as long as what it hangs on."""


def take_along(tag: Tag, *_: object) -> None:
    """A hook that keeps the tag alive."""


def test_moments_hold_no_graph_and_no_input():
    ours = deferred(nn.BatchNorm2d(FEATURES))
    collector = Collector([ours])
    x = torch.randn(4, FEATURES, 2, 2, requires_grad=True)
    with collector.observing(0):
        output = ours(x)
    hung_on_graph = Tag()
    output.grad_fn.register_hook(partial(take_along, hung_on_graph))
    graph = weakref.ref(hung_on_graph)
    del output, hung_on_graph
    ((moments,),) = collector._moments[ours].values()
    for tensor in (moments.mean, moments.deviations):
        assert not tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == 4 * FEATURES
    assert graph() is None
    collector.commit()
    assert not collector._moments[ours]


def test_statistics_are_computed_by_the_kernel_alone():
    ours = deferred(nn.BatchNorm1d(FEATURES))
    with torch.profiler.profile() as profile, Collector([ours]).observing(0):
        ours(torch.randn(8, FEATURES))
    names = [event.key for event in profile.key_averages()]
    assert "aten::native_batch_norm" in names
    assert not {"aten::mean", "aten::var", "aten::var_mean", "aten::sum"} & set(names)


def test_wrong_inputs_are_refused_as_ever():
    ours = deferred(nn.BatchNorm1d(FEATURES))
    collector = Collector([ours])
    with pytest.raises(ValueError, match="expected 2D or 3D input"), collector.observing(0):
        ours(torch.randn(4, FEATURES, 2, 2))
    with pytest.raises(RuntimeError, match="running_mean should contain"), collector.observing(0):
        ours(torch.randn(4, FEATURES + 1))
    ours.eps = 0.0
    with pytest.raises(ValueError, match=r"eps of a BatchNorm is 0\.0"), collector.observing(0):
        ours(torch.randn(4, FEATURES))
    assert not collector._moments[ours]


# ---- outside of a mini-batch, and where nothing is deferred ----


def test_outside_of_a_minibatch_it_is_torchs():
    plain = lively(nn.BatchNorm1d(FEATURES))
    ours = deferred(plain)
    for _ in range(2):
        x = data((FEATURES,))
        assert torch.equal(ours(x), plain(x))
        assert_unchanged(ours, buffers(plain))
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            ours(x[:1])
        plain.num_batches_tracked.copy_(ours.num_batches_tracked)  # torch counts before it refuses
        train(ours, x.split(4))
        plain.load_state_dict(ours.state_dict())


def test_a_norm_that_the_collector_does_not_know_is_torchs():
    known, other = (deferred(nn.BatchNorm1d(FEATURES)) for _ in range(2))
    with Collector([known]).observing(0):
        other(torch.randn(4, FEATURES))
    assert other.num_batches_tracked.item() == 1


@pytest.mark.parametrize("where", ["observing", "replaying"])
def test_a_norm_in_eval_uses_its_running_statistics(where):
    plain = lively(nn.BatchNorm1d(FEATURES)).eval()
    model = nn.Sequential(nn.BatchNorm1d(FEATURES).double(), copy.deepcopy(plain))
    collector = Collector(defer_batch_norm([model]))
    assert model[0].training
    assert not model[1].training
    before = buffers(model[1])
    x = data((FEATURES,), rows=1)
    with collector.observing(0) if where == "observing" else collector.replaying():
        assert torch.equal(model[1](x), plain(x))
    collector.commit()
    assert_unchanged(
        model, {f"{i}.{k}": v for i in "01" for k, v in buffers(model[int(i)]).items()}
    )
    assert_unchanged(model[1], before)


def test_statistics_that_are_frozen_stay():
    plain = lively(nn.BatchNorm1d(FEATURES))
    plain.track_running_stats = False
    ours = deferred(plain)
    before = buffers(ours)
    x = data((FEATURES,))
    train(ours, x.split(4))
    plain(x)
    assert_unchanged(ours, before)
    assert_unchanged(plain, before)


def test_without_statistics_there_is_nothing_to_defer():
    plain = lively(nn.BatchNorm1d(FEATURES, track_running_stats=False))
    ours = deferred(plain)
    collector = Collector([ours])
    x = data((FEATURES,))
    (output,) = observe(ours, [x], collector)
    assert torch.equal(output, plain(x))
    with pytest.raises(ValueError, match="Expected more than 1 value"), collector.observing(1):
        ours(x[:1])
    collector.commit()
    assert dict(ours.named_buffers()) == {}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_statistics_move_without_grad_too(mode):
    # `torch.optim.swa_utils.update_bn` does this.
    plain = lively(nn.BatchNorm1d(FEATURES, momentum=None))
    ours = deferred(plain)
    x = data((FEATURES,))
    collector = Collector([ours])
    with mode():
        plain(x)
        observe(ours, x.split(5), collector)
    collector.commit()
    assert_close(ours, plain)
