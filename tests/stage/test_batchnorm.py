"""Law 9: the running statistics are those of the un-split mini-batch."""

import copy
import io
import itertools
import pickle
import threading
import weakref
from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe.stage.batchnorm import (
    Collector,
    DeferredBatchNorm1d,
    DeferredBatchNorm2d,
    DeferredBatchNorm3d,
    defer_batch_norm,
)

FEATURES = 3
SHAPES = {
    "1d, rows": (nn.BatchNorm1d, (FEATURES,)),
    "1d, sequences": (nn.BatchNorm1d, (FEATURES, 4)),
    "2d": (nn.BatchNorm2d, (FEATURES, 2, 3)),
    "3d": (nn.BatchNorm3d, (FEATURES, 2, 1, 2)),
}
SPLITS = [[12], [6, 6], [4, 4, 4], [5, 5, 2], [1, 11], [1] * 12]


def lively(norm: nn.Module) -> nn.Module:
    """The norm in float64, with parameters and buffers that are not those of its start."""
    torch.manual_seed(1)
    norm.double()
    for tensor in norm.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 2)
    return norm


def deferred(norm: nn.Module) -> nn.Module:
    """A deferred copy."""
    (result,) = defer_batch_norm([copy.deepcopy(norm)])
    return result


def data(shape: Iterable[int], rows: int = 12) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(rows, *shape, dtype=torch.float64) * 3 + 2


def observe(
    module: nn.Module, microbatches: Iterable[Tensor], collector: Collector
) -> list[Tensor]:
    outputs = []
    for microbatch, x in enumerate(microbatches):
        with collector.observing(microbatch):
            outputs.append(module(x))
    return outputs


def train(module: nn.Module, microbatches: Iterable[Tensor]) -> None:
    """One mini-batch, as the engine drives it."""
    collector = Collector(defer_batch_norm([module]))
    observe(module, microbatches, collector)
    collector.commit()


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_close(module: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    ours = dict(module.named_buffers())
    assert ours.keys() == dict(plain.named_buffers()).keys()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(
            ours[name], buffer, **tolerance or {"rtol": 1e-12, "atol": 1e-12}
        )


def assert_unchanged(module: nn.Module, before: dict[str, Tensor]) -> None:
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


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


# ---- several uses, several micro-batches, several threads ----


class Twice(nn.Module):
    """Uses its norm twice, on different values."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x), self.norm(x * 2 + 1)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_each_use_updates_in_order_of_use(momentum):
    # Norms before and after it: nothing but the norms and their uses counts.
    plain = Twice(lively(nn.BatchNorm1d(FEATURES, momentum=momentum)))
    ours = copy.deepcopy(plain)
    x = data((FEATURES,))
    plain(x)
    train(ours, x.split([5, 4, 3]))
    assert plain.norm.num_batches_tracked.item() == 2
    assert_close(ours, plain)


def test_uses_in_two_stages_count_in_order_of_use():
    plain = lively(nn.BatchNorm1d(FEATURES))
    ours = deferred(plain)
    collector = Collector([ours])
    x = data((FEATURES,))
    plain(x)
    plain(x * 7)
    observe(ours, x.split(4), collector)
    observe(ours, (x * 7).split(4), collector)
    collector.commit()
    assert_close(ours, plain)


def test_bits_do_not_depend_on_the_order_of_arrival():
    torch.manual_seed(4)
    pieces = (torch.randn(23, 50) * 7 + 3).split([6, 1, 5, 4, 7])
    seen = []
    for order in itertools.permutations(range(5)):
        ours = deferred(nn.BatchNorm1d(50))
        collector = Collector([ours])
        for microbatch in order:
            with collector.observing(microbatch):
                ours(pieces[microbatch])
        collector.commit()
        seen.append(buffers(ours))
    assert all(torch.equal(seen[0][name], other[name]) for other in seen for name in other)


def test_threads_observe_different_microbatches_at_once():
    plain = nn.Sequential(*(lively(nn.BatchNorm1d(FEATURES)) for _ in range(2)))
    ours = copy.deepcopy(plain)
    norms = defer_batch_norm([ours])
    collector = Collector(norms)
    x = data((FEATURES,))
    pieces = x.tensor_split(2)
    both_inside = threading.Barrier(2)

    def stage(index: int) -> None:
        for turn in range(2):
            microbatch = (index + turn) % 2
            with collector.observing(microbatch):
                both_inside.wait(timeout=10)
                norms[index](pieces[microbatch])
                both_inside.wait(timeout=10)

    threads = [threading.Thread(target=stage, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    collector.commit()
    for norm in plain:
        norm(x)
    assert_close(ours, plain)


def interrupted(norm: nn.Module) -> None:
    norm(data((FEATURES,)))
    raise KeyboardInterrupt


def test_without_a_commit_nothing_has_changed():
    ours = deferred(lively(nn.BatchNorm1d(FEATURES)))
    before = buffers(ours)
    versions = [buffer._version for buffer in ours.buffers()]
    collector = Collector([ours])
    observe(ours, data((FEATURES,)).split(4), collector)
    with pytest.raises(KeyboardInterrupt), collector.observing(4):
        interrupted(ours)
    assert_unchanged(ours, before)
    assert [buffer._version for buffer in ours.buffers()] == versions
    ours(data((FEATURES,)))  # and this thread observes no longer
    assert ours.num_batches_tracked.item() == 1


def test_a_second_commit_commits_nothing():
    ours = deferred(nn.BatchNorm1d(FEATURES).double())
    collector = Collector([ours])
    observe(ours, [data((FEATURES,))], collector)
    collector.commit()
    before = buffers(ours)
    collector.commit()
    assert_unchanged(ours, before)


def test_collectors_inside_each_other():
    inner, outer = (deferred(nn.BatchNorm1d(FEATURES)) for _ in range(2))
    collectors = Collector([inner]), Collector([outer])
    x = torch.randn(4, FEATURES)
    with collectors[1].observing(0):
        with collectors[0].observing(5):
            inner(x)
        outer(x)
    for collector in collectors:
        collector.commit()
    assert inner.num_batches_tracked.item() == outer.num_batches_tracked.item() == 1


def test_a_compiled_layer_is_deferred_too():
    # A tracer that froze "nothing observes" into its graph would leak each micro-batch.
    plain = lively(nn.BatchNorm1d(FEATURES))
    ours = deferred(plain)
    compiled = torch.compile(ours, backend="eager")
    x = data((FEATURES,))
    for _ in range(2):
        compiled(x)
        plain(x)
        collector = Collector([ours])
        observe(compiled, x.split(3), collector)
        with collector.replaying():
            compiled(x[:3])
        collector.commit()
        plain(x)
        assert_close(ours, plain)


# ---- conversion ----


def nested() -> nn.Sequential:
    shared = nn.BatchNorm1d(FEATURES)
    return nn.Sequential(
        nn.Linear(FEATURES, FEATURES),
        nn.Sequential(nn.BatchNorm2d(FEATURES), nn.ModuleList([nn.BatchNorm3d(FEATURES), shared])),
        shared,
        nn.BatchNorm1d(FEATURES, affine=False, momentum=None),
    )


def test_conversion_changes_classes_only():
    model = nested()
    model[2].eval()
    hits = []
    model[2].register_forward_hook(lambda *_: hits.append("hook"))
    modules = dict(model.named_modules())
    tensors = {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
    attributes = {name: vars(module).copy() for name, module in modules.items()}

    norms = defer_batch_norm(model)
    assert norms == [model[1][0], model[1][1][0], model[2], model[3]]
    classes = [DeferredBatchNorm2d, DeferredBatchNorm3d, DeferredBatchNorm1d, DeferredBatchNorm1d]
    assert [type(norm) for norm in norms] == classes
    bases = [nn.BatchNorm2d, nn.BatchNorm3d, nn.BatchNorm1d, nn.BatchNorm1d]
    assert all(isinstance(norm, base) for norm, base in zip(norms, bases, strict=True))
    assert all(after is modules[name] for name, after in model.named_modules())
    assert {name: id(t) for name, t in model.state_dict(keep_vars=True).items()} == tensors
    assert {name: vars(module) for name, module in model.named_modules()} == attributes
    model[2](torch.randn(2, FEATURES))
    assert hits == ["hook"]
    nested().load_state_dict(model.state_dict())
    assert model.state_dict()._metadata == nested().state_dict()._metadata


def test_conversion_is_idempotent():
    model = nested()
    norms = defer_batch_norm(model)
    assert defer_batch_norm(model) == norms
    assert [type(norm) for norm in defer_batch_norm(model)] == [type(norm) for norm in norms]


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_copies_are_deferred_too(copied):
    plain = lively(nn.BatchNorm1d(FEATURES))
    original = deferred(plain)
    ours = copied(original)
    assert type(ours) is DeferredBatchNorm1d
    x = data((FEATURES,))
    before = buffers(original)
    train(ours, x.split(5))
    plain(x)
    assert_close(ours, plain)
    assert_unchanged(original, before)


class Loud(nn.BatchNorm1d):
    """A user's subclass."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class LoudDeferred(DeferredBatchNorm1d):
    """The same on the remedy's base."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def replaced() -> nn.Module:
    """A norm whose forward was wrapped in place, as some libraries do."""
    norm = nn.BatchNorm1d(FEATURES)
    norm.forward = norm.forward
    return norm


TALKS = (
    r"'norm' in layer 1 is of type SyncBatchNorm, which deferred_batch_norm cannot defer: it talks "
    r"to other processes .* Use nn\.BatchNorm1d, 2d or 3d instead; or leave out"
)
OWN = r"has a forward of its own, .* derive its class from gpipe\.stage\.batchnorm\.Deferred"
REFUSED = [
    pytest.param(lambda: nn.SyncBatchNorm(FEATURES), TALKS, id="sync"),
    pytest.param(nn.LazyBatchNorm1d, "becomes another class .* Run that first", id="lazy"),
    pytest.param(lambda: Loud(FEATURES), f"Loud, .* {OWN}", id="subclass"),
    pytest.param(replaced, f"BatchNorm1d, .* {OWN}", id="replaced forward"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_deferred_is_refused_and_nothing_changes(make, message):
    first, norm = nn.BatchNorm1d(FEATURES), make()
    layer = nn.Sequential()
    layer.add_module("norm", norm)
    with pytest.raises(ValueError, match=message):
        defer_batch_norm([first, layer])
    assert type(first) is nn.BatchNorm1d
    with pytest.raises(ValueError, match="Layer 0 is of type"):
        defer_batch_norm([norm])


def test_a_users_subclass_of_a_deferred_norm_is_deferred():
    plain = nn.BatchNorm1d(FEATURES).double()
    ours = LoudDeferred(FEATURES).double()
    assert defer_batch_norm([ours]) == [ours]
    assert type(ours) is LoudDeferred
    x = data((FEATURES,))
    train(ours, x.split(4))
    plain(x)
    assert_close(ours, plain)
