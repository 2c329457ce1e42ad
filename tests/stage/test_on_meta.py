"""Whether a model can be built on meta: nothing that its constructor does is lost silently."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from gpipe.models import mlp, transformer
from gpipe.stage.device import HOST
from gpipe.stage.materialise import materialise
from gpipe.stage.on_meta import built_on_meta


def tied():
    embedding, linear = nn.Embedding(5, 3), nn.Linear(3, 5)
    linear.weight = embedding.weight
    return nn.Sequential(embedding, linear)


class Repeated(nn.Module):
    """Written to outside, and then by its reset."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("ids", torch.arange(3), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        nn.init.trunc_normal_(self.weight)
        self.ids.copy_(torch.arange(3))


FAITHFUL = {
    "mlp": lambda: mlp([3, 4, 5], dropout=0.1),
    "transformer": lambda: transformer(2, 8, 2, 11),
    "bf16": lambda: transformer(2, 8, 2, 11).to(torch.bfloat16),
    "tied": tied,
    "torch": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 2),
        nn.BatchNorm2d(4),
        nn.LSTM(3, 4, 2),
        nn.MultiheadAttention(4, 2, add_bias_kv=True),
        nn.TransformerEncoderLayer(4, 2, 8),
        nn.GroupNorm(2, 4),
        nn.RMSNorm(4),
        nn.Embedding(4, 4, padding_idx=1),
        nn.EmbeddingBag(4, 4),
        nn.PReLU(),
        nn.Bilinear(2, 3, 4),
        nn.GRUCell(2, 3),
    ),
    "repeated": lambda: nn.Sequential(Repeated()),
}


@pytest.mark.parametrize("name", FAITHFUL)
def test_what_resets_give_can_be_built_on_meta(name):
    module, reasons = built_on_meta(FAITHFUL[name])
    assert reasons == ()
    assert all(parameter.is_meta for parameter in module.parameters())
    materialise(dict(enumerate(module)), range(len(module)), HOST, 0)
    assert not any(parameter.is_meta for parameter in module.parameters())
    assert not any(parameter.isnan().any() for parameter in module.parameters())


def changed(change):
    def factory():
        linear = nn.Linear(3, 3)
        change(linear)
        return nn.Sequential(linear)

    return factory


class Owns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.weight = make()


class WithArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.reset_parameters(0.02)

    def reset_parameters(self, std=1.0):
        nn.init.normal_(self.weight, std=std)


class TwoResets(nn.Module):
    """Of which the constructor calls the one that `materialise` does not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self._reset_parameters()

    def _reset_parameters(self):
        nn.init.ones_(self.weight)

    def reset_parameters(self):
        nn.init.zeros_(self.weight)


class Mask(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(3, 3).tril().bool(), persistent=False)


class OfAnother(nn.Module):
    """Takes the weight of a module that it does not keep."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(3, 3).weight


class Whole(nn.Sequential):
    """Resets its layers by itself, which the pieces of it cannot."""

    def __init__(self):
        super().__init__(nn.Linear(3, 3))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.zeros_(self[0].bias)


def assign_data(linear):
    linear.weight.data = torch.randn(3, 3)


def assign_row(linear):
    with torch.no_grad():
        linear.weight[0] = 0


def decided(linear):
    if linear.weight.sum() > 0:
        nn.init.zeros_(linear.bias)


def copies():
    linear = nn.Linear(3, 3)
    return nn.Sequential(linear, copy.deepcopy(linear))


UNFAITHFUL = {
    "normal": (changed(lambda x: nn.init.normal_(x.weight, std=0.02)), "'0.weight' .*normal_ at "),
    "trunc": (changed(lambda x: nn.init.trunc_normal_(x.weight)), "'0.weight' .*trunc_normal_"),
    "orthogonal": (changed(lambda x: nn.init.orthogonal_(x.weight)), "'0.weight' .*orthogonal_"),
    "sparse": (changed(lambda x: nn.init.sparse_(x.weight, 0.5)), "'0.weight'"),
    "apply": (changed(lambda x: x.apply(lambda y: y.bias.data.zero_())), "'0.bias' .*zero_"),
    "row": (changed(assign_row), "'0.weight' .*copy_ at test_on_meta.py:"),
    "data": (changed(assign_data), "'0.weight' .*randn at test_on_meta.py:"),
    "decided": (changed(decided), "cannot be built there: .*meta"),
    "item": (changed(lambda x: x.weight[0, 0].item()), "cannot be built there: .*meta"),
    "parameter": (lambda: nn.Sequential(Owns(lambda: nn.Parameter(torch.randn(3)))), "'0.weight'"),
    "empty": (lambda: nn.Sequential(Owns(lambda: nn.Parameter(torch.empty(3)))), "is given no val"),
    "loose": (lambda: nn.Sequential(Owns(lambda: torch.ones(3))), "attribute '0.weight' is regist"),
    "mask": (
        lambda: nn.Sequential(Mask()),
        "buffer '0.mask' has its values from _to_copy|'0.mask'",
    ),
    "argument": (lambda: nn.Sequential(WithArgument()), "'0.weight' .*normal_"),
    "two resets": (lambda: nn.Sequential(TwoResets()), "'0.weight' .*fill_"),
    "another": (lambda: nn.Sequential(OfAnother()), "'0.weight' .*uniform_"),
    "whole": (Whole, "'0.bias' .*zero_|'0.bias' .*fill_"),
    "copies": (copies, "'1.weight' .*clone"),
    "weight norm": (lambda: nn.Sequential(weight_norm(nn.Linear(3, 3))), "original0"),
    "view": (changed(lambda x: setattr(x, "bias", nn.Parameter(x.weight[0]))), "is a view of"),
    "constant": (lambda: nn.Sequential(Owns(lambda: nn.Parameter(torch.tensor([1.0])))), "'0.wei"),
}


@pytest.mark.parametrize("name", UNFAITHFUL)
def test_what_would_be_lost_is_a_reason(name):
    factory, expected = UNFAITHFUL[name]
    module, reasons = built_on_meta(factory)
    assert module is None
    assert len(reasons) <= 2
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError("\n".join(reasons))


def test_every_reason_is_given():
    def factory():
        return nn.Sequential(Mask(), Owns(lambda: nn.Parameter(torch.ones(2))), nn.Linear(2, 2))

    assert len(built_on_meta(factory).reasons) == 2


def test_values_made_elsewhere_are_kept():
    class Real(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("ids", torch.arange(3, device=HOST))
            self.linear = nn.Linear(3, 3)

    module, reasons = built_on_meta(lambda: nn.Sequential(Real()))
    assert reasons == ()
    materialise({0: module[0]}, [0], HOST, 0)
    assert module[0].ids.tolist() == [0, 1, 2]


def test_generators_are_left_as_they_were():
    before = torch.get_rng_state()
    built_on_meta(lambda: nn.Sequential(Owns(lambda: torch.randn(3, device=HOST))))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_interrupt_passes():
    def factory():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        built_on_meta(factory)
