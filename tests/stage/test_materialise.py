"""First values of layers on meta: the same wherever the model is cut, and never none."""

import copy
import itertools
import random
import re
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from gpipe.models import mlp, transformer
from gpipe.stage.device import HOST, default_devices
from gpipe.stage.materialise import materialise
from tests.gpu.devices import needs_accelerator


class Attention(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, add_bias_kv=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class First(nn.Module):
    """The output of an RNN without its state."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0]


class Norm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Positions(nn.Module):
    """A buffer that is no part of the state, and a boolean one."""

    def __init__(self, num_tokens=5):
        super().__init__()
        self.register_buffer("ids", torch.empty(num_tokens, dtype=torch.int64), persistent=False)
        self.register_buffer("mask", torch.empty(num_tokens, dtype=torch.bool), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.ids.copy_(torch.arange(len(self.ids)))
        self.mask.copy_(self.ids % 2 == 0)

    def forward(self, x):
        return x + self.ids[:, None] * self.mask[:, None]


class Tied(nn.Module):
    def __init__(self, embedding, scale=False):
        super().__init__()
        self.logits = nn.Linear(8, 11)
        self.logits.weight = embedding.weight

    def forward(self, x):
        return self.logits(x)


def everything():
    """A layer of each kind; the last shares the embedding's weight."""
    embedding = nn.Embedding(11, 8, padding_idx=0)
    layers = [
        embedding,
        Positions(),
        nn.LayerNorm(8),
        First(nn.LSTM(8, 4, 2, bidirectional=True, batch_first=True)),
        Attention(),
        Norm(8),
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.PReLU()),
        nn.Dropout(0.1),
        weight_norm(nn.Linear(8, 8)),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        Tied(embedding),
    ]
    return nn.Sequential(*layers)


def tied_tail():
    embedding = nn.Embedding(11, 8)
    return nn.Sequential(embedding, nn.Linear(8, 8), Tied(embedding), Tied(embedding))


MODELS = {
    "everything": everything,
    "tied tail": tied_tail,
    "mlp": lambda: mlp([4, 5, 6, 3], dropout=0.1),
    "transformer": lambda: transformer(3, 8, 2, 11, dropout=0.1),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=MODELS)
def factory(request):
    return MODELS[request.param]


def on_meta(factory, dtype=None):
    with torch.device("meta"):
        return factory().to(dtype)


def layers_of(module):
    return dict(enumerate(module))


def made(factory, *parts, dtype=None, seed=3):
    """The model on meta with these parts made real, one after another."""
    module = on_meta(factory, dtype)
    layers = layers_of(module)
    for part in parts or [list(layers)]:
        materialise(layers, part, HOST, seed)
    return module


def values(layer):
    """All parameters and buffers, those too that a state dict leaves out."""
    named = itertools.chain(
        layer.named_parameters(remove_duplicate=False), layer.named_buffers(remove_duplicate=False)
    )
    return {name: tensor.detach().clone() for name, tensor in named}


def assert_same(mine, other):
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert not tensor.is_meta, name
        assert tensor.dtype == other[name].dtype, name
        assert tensor.stride() == other[name].stride(), name
        assert torch.equal(tensor, other[name]), name


def balances(num_layers):
    for num_cuts in range(num_layers):
        for cuts in itertools.combinations(range(1, num_layers), num_cuts):
            yield [range(start, end) for start, end in itertools.pairwise([0, *cuts, num_layers])]


# ---- the same values, whatever a process materialises ----


def test_each_stage_of_each_balance_has_the_values_of_the_whole(factory, dtype):
    whole = [values(layer) for layer in made(factory, dtype=dtype)]
    stages = {stage for balance in balances(len(whole)) for stage in balance}
    for stage in stages:
        module = made(factory, stage, dtype=dtype)
        for index in stage:
            assert_same(values(module[index]), whole[index])


def test_stages_in_one_process_have_the_values_of_the_whole_in_any_order(factory):
    whole = values(made(factory))
    num_layers = len(factory())
    for balance in balances(min(num_layers, 4)):
        parts = [*balance, range(min(num_layers, 4), num_layers)]
        for order in (parts, parts[::-1]):
            assert_same(values(made(factory, *order)), whole)


def test_layers_that_are_not_wanted_stay_on_meta():
    module = made(everything, [1, 10])
    assert not any(tensor.is_meta for tensor in values(module[10]).values())
    for index in (2, 3, 4, 5, 6, 8, 9):
        assert all(tensor.is_meta for tensor in values(module[index]).values())


def test_the_seed_and_the_index_decide():
    values_of = lambda **arguments: values(made(lambda: mlp([4, 4, 4]), **arguments))  # noqa: E731
    first, again, other = values_of(seed=1), values_of(seed=1), values_of(seed=2)
    assert_same(first, again)
    assert not torch.equal(first["0.weight"], other["0.weight"])
    assert not torch.equal(first["0.weight"], first["2.weight"])


def test_generators_are_left_as_they_were():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    made(everything)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


class Drawn(nn.Module):
    """Draws from NumPy and from Python."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))

    def reset_parameters(self):
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(np.random.rand(3)) + random.random())


def test_generators_of_numpy_and_python_are_seeded_too():
    factory = lambda: nn.Sequential(Drawn(), Drawn())  # noqa: E731
    whole = values(made(factory))
    random.random()
    np.random.rand()
    assert torch.equal(made(factory, [1])[1].weight, whole["1.weight"])


def test_the_modes_of_the_caller_do_not_matter():
    whole = values(made(everything))
    module = on_meta(everything)
    with torch.device("meta"), torch.inference_mode():
        materialise(layers_of(module), range(len(module)), HOST, 3)
    assert_same(values(module), whole)
    assert not any(parameter.is_inference() for parameter in module.parameters())


class Shares(nn.Module):
    """Divides by a sum, which several threads take in another order."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1_000_003))

    def reset_parameters(self):
        self.weight.normal_()
        self.weight.div_(self.weight.sum())


def test_the_number_of_threads_does_not_matter():
    before, several = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            several.append(values(made(lambda: nn.Sequential(Shares()))))
            assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert_same(several[0], several[1])
    assert_same(several[0], several[2])


def test_the_distribution_is_that_of_the_constructor():
    module = made(lambda: transformer(1, 64, 2, 500))
    torch.manual_seed(0)
    eager = values(transformer(1, 64, 2, 500))
    for name, tensor in values(module).items():
        assert tensor.std() == pytest.approx(float(eager[name].std()), rel=0.2, abs=1e-6)


@pytest.mark.gpu
@needs_accelerator
@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_an_accelerator_has_the_values_of_the_host(factory):
    module, device = on_meta(factory), default_devices()[0]
    materialise(layers_of(module), range(len(module)), device, 3)
    assert {tensor.device for tensor in values(module).values()} == {device}
    assert_same({name: each.cpu() for name, each in values(module).items()}, values(made(factory)))


def test_real_layers_are_let_be():
    module = on_meta(everything)
    module[6] = nn.Linear(8, 8)
    before = values(module[6])
    materialise(layers_of(module), range(len(module)), HOST, 3)
    assert_same(values(module[6]), before)


def test_a_real_tensor_in_a_layer_on_meta_is_let_be():
    module = on_meta(lambda: mlp([4, 5, 6]))
    module[0].weight = nn.Parameter(torch.full((5, 4), 7.0))
    materialise(layers_of(module), [0], HOST, 3)
    assert (module[0].weight == 7).all()
    assert torch.equal(module[0].bias, made(lambda: mlp([4, 5, 6]))[0].bias)


def test_the_model_trains():
    module = made(everything)
    module(torch.randint(1, 11, (3, 5))).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


# ---- ties and identity ----


def test_ties_survive():
    module = made(tied_tail)
    assert module[0].weight is module[2].logits.weight is module[3].logits.weight
    assert len(list(module.parameters())) == 5


def test_a_tied_parameter_has_the_values_of_its_first_layer():
    alone = made(lambda: nn.Sequential(nn.Embedding(11, 8)))
    for part in ([0], [2], [3], [2, 3], [0, 3]):
        module = made(tied_tail, part)
        assert torch.equal(module[3].logits.weight, alone[0].weight)
        assert module[0].weight is module[2].logits.weight is module[3].logits.weight


def test_a_layer_reset_for_its_tied_parameter_alone_stays_on_meta():
    module = on_meta(lambda: nn.Sequential(Both(), nn.ReLU(), nn.Linear(4, 4)))
    module[2].weight = module[0].a.weight
    materialise(layers_of(module), [2], HOST, 3)
    assert module[0].b.weight.is_meta
    assert module[0].a.bias.is_meta


class Both(nn.Module):
    """Two layers that share a weight and a buffer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)
        self.c.weight = self.a.weight
        self.norm, self.other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.other.running_mean = self.norm.running_mean


def test_ties_within_a_layer_survive():
    module = made(lambda: nn.Sequential(Both()))
    assert module[0].a.weight is module[0].c.weight
    assert module[0].norm.running_mean is module[0].other.running_mean
    assert not module[0].norm.running_mean.is_meta


def test_parameters_stay_the_objects_that_they_are():
    module = on_meta(lambda: nn.Sequential(First(nn.LSTM(3, 4)), nn.Linear(4, 4)))
    parameters = list(module.parameters())
    seen = [weakref.ref(parameter) for parameter in parameters]
    module[1].weight.tag = "kept"
    module[1].bias.requires_grad_(False)
    calls = []
    module[1].register_forward_hook(lambda *_: calls.append("forward"))
    module[1].weight.register_hook(lambda _: calls.append("gradient"))
    module[1].weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    materialise(layers_of(module), [0, 1], HOST, 0)
    assert all(mine is other for mine, other in zip(module.parameters(), parameters, strict=True))
    assert all(type(parameter) is nn.Parameter for parameter in parameters)
    assert all(ref() is parameter for ref, parameter in zip(seen, parameters, strict=True))
    assert module[1].weight.tag == "kept"
    assert not module[1].bias.requires_grad
    module(torch.ones(2, 1, 3)).sum().backward()
    assert calls == ["forward", "gradient", "accumulated"]


def test_the_weights_that_an_lstm_lists_are_its_parameters():
    lstm = made(lambda: nn.Sequential(nn.LSTM(3, 4)))[0]
    assert all(
        mine is getattr(lstm, name)
        for mine, name in zip(lstm._flat_weights, lstm._flat_weights_names, strict=True)
    )
    copied = copy.deepcopy(lstm)
    assert torch.equal(lstm(torch.ones(2, 3))[0], copied(torch.ones(2, 3))[0])


def test_channels_last_stays():
    factory = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    )
    assert made(factory)[0].weight.is_contiguous(memory_format=torch.channels_last)


class Replaces(nn.Module):
    """A reset that makes new tensors, and has a tied parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8))
        self.register_buffer("ids", torch.empty(3, dtype=torch.int32))
        self.reset_parameters()

    def reset_parameters(self):
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.ids = torch.arange(3)


def test_a_reset_that_makes_new_tensors_breaks_no_tie():
    def factory():
        replaces, linear = Replaces(), nn.Linear(8, 8)
        linear.weight = replaces.weight
        return nn.Sequential(replaces, linear)

    module = made(factory)
    assert module[0].weight is module[1].weight
    assert module[0].ids.tolist() == [0, 1, 2]
    assert torch.equal(made(factory, [1])[1].weight, module[0].weight)


def test_a_container_has_the_last_word():
    class Container(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)

        def reset_parameters(self):
            nn.init.constant_(self.linear.weight, 5)
            nn.init.constant_(self.norm.bias, 4)

    module = made(lambda: nn.Sequential(Container()))
    assert (module[0].linear.weight == 5).all()
    assert (module[0].norm.bias == 4).all()
    assert (module[0].norm.weight == 1).all()


def test_weight_norm_computes_with_what_the_reset_gave():
    module = made(lambda: nn.Sequential(weight_norm(nn.Linear(30, 30))))
    weight = module[0].weight.detach()
    assert 0 < weight.abs().max() <= 30**-0.5
    assert weight.unique().numel() > 800


# ---- nothing stays without a value ----


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("ids", torch.arange(3), persistent=False)


class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.register_buffer("count", torch.zeros((), dtype=torch.uint8))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))

    def reset_parameters(self):
        nn.init.zeros_(self.weight[0])  # but not weight[1]


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def reset_parameters(self, std):
        """Cannot be called without the argument."""


def refusal(factory, part=None):
    module = on_meta(factory)
    with pytest.raises(ValueError, match="on meta, and some tensors cannot") as caught:
        materialise(layers_of(module), range(len(module)) if part is None else part, HOST, 0)
    assert all(tensor.is_meta for tensor in module.parameters())  # nothing has changed
    assert all(tensor.is_meta for tensor in module.buffers())
    return str(caught.value)


def test_all_that_has_no_value_is_named_at_once():
    text = refusal(lambda: nn.Sequential(Scale(), nn.Linear(2, 2), Forgetful(), Fails()))
    lines = [line.strip() for line in text.splitlines()]
    assert "layer 0 (Scale): parameter 'weight': Scale has no reset_parameters()" in lines
    assert "layer 0 (Scale): buffer 'ids': Scale has no reset_parameters()" in lines
    kind = "Forgetful.reset_parameters() leaves it out"
    assert f"layer 2 (Forgetful): parameter 'weight': {kind}" in lines
    assert f"layer 2 (Forgetful): buffer 'count': {kind}" in lines
    assert f"layer 2 (Forgetful): buffer 'mask': {kind}" in lines
    assert "linear" not in text
    assert re.search(r"layer 3 \(Fails\): reset_parameters\(\): TypeError: .*'std'", text)
    assert text.endswith("not under torch.device('meta').")


def test_a_layer_without_resets_is_named_by_every_process():
    assert "layer 0 (Scale)" in refusal(lambda: nn.Sequential(Scale(), nn.Linear(2, 2)), [1])


def test_what_the_layer_of_a_tie_lacks_is_named_where_the_other_is():
    def factory():
        first, last = Forgetful(), nn.Linear(2, 2)
        last.weight = first.weight
        return nn.Sequential(first, last)

    assert "layer 0 (Forgetful): parameter 'weight'" in refusal(factory, [1])


def test_a_reset_that_fails_keeps_its_traceback():
    module = on_meta(lambda: nn.Sequential(Fails()))
    with pytest.raises(ValueError, match="Fails") as caught:
        materialise(layers_of(module), [0], HOST, 0)
    assert isinstance(caught.value.__cause__, TypeError)


class Small(nn.Module):
    """Values of one byte that equal whatever could stand for none."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bytes", torch.empty(256, dtype=torch.uint8))
        self.register_buffer("flags", torch.empty(2, dtype=torch.bool))
        self.register_buffer("complex", torch.empty(2, dtype=torch.complex64))

    def reset_parameters(self):
        self.bytes.copy_(torch.arange(256))
        self.flags.copy_(torch.tensor([True, False]))
        self.complex.fill_(1j)


def test_small_numbers_that_are_set_are_not_taken_for_none():
    small = made(lambda: nn.Sequential(Small()))[0]
    assert small.bytes.tolist() == list(range(256))
    assert small.flags.tolist() == [True, False]


def test_float8_that_is_left_out_is_named():
    class Eighth(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.empty(2, dtype=torch.float8_e4m3fn))

        def reset_parameters(self):
            pass

    assert "buffer 'weight'" in refusal(lambda: nn.Sequential(Eighth()))


def test_a_tensor_that_is_not_registered_is_named():
    module = on_meta(lambda: nn.Sequential(nn.Linear(2, 2)))
    module[0].scales = [torch.ones(2, device="meta")]
    with pytest.raises(ValueError, match="attribute 'scales': it is registered neither"):
        materialise(layers_of(module), [0], HOST, 0)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_parameter_is_named():
    text = refusal(lambda: nn.Sequential(nn.LazyLinear(3)))
    assert "parameter 'weight': it has no shape before the first forward" in text
    assert "parameter 'bias': it has no shape" in text


def test_a_view_of_another_parameter_is_named():
    def factory():
        a, b = nn.Linear(2, 2), nn.Linear(2, 2)
        b.weight = nn.Parameter(a.weight.detach())
        return nn.Sequential(a, b)

    assert re.search(r"layer 1 \(Linear\): parameter 'weight': it is a view of", refusal(factory))


def test_spectral_norm_is_named():
    assert "buffer" in refusal(lambda: nn.Sequential(spectral_norm(nn.Linear(3, 3))))


def test_a_reset_that_changes_the_shape_is_named():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("x", torch.empty(2))

        def reset_parameters(self):
            self.x = torch.ones(3)

    text = refusal(lambda: nn.Sequential(Grows()))
    assert "its reset leaves the shape (3,) where (2,) was" in text
    assert "leaves it out" not in text


def test_an_interrupt_leaves_the_layers_on_meta():
    class Interrupted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2))

        def reset_parameters(self):
            raise KeyboardInterrupt

    module = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Interrupted()))
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        materialise(layers_of(module), [0, 1], HOST, 0)
    assert all(tensor.is_meta for tensor in values(module).values())
    assert torch.equal(torch.get_rng_state(), before)


def test_empty_tensors_need_no_value():
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("none", torch.empty(0))

    assert not made(lambda: nn.Sequential(Empty()))[0].none.is_meta
