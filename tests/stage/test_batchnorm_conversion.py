"""How norms become deferred ones, and which cannot."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from gpipe.stage.batchnorm import (
    DeferredBatchNorm1d,
    DeferredBatchNorm2d,
    DeferredBatchNorm3d,
    defer_batch_norm,
)
from tests.stage.norms import (
    FEATURES,
    assert_close,
    assert_unchanged,
    buffers,
    data,
    deferred,
    lively,
    train,
)

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
