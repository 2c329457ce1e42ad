"""Law 1: whatever crosses a boundary, as in the plain model."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe
from tests.laws.values import (
    CHUNKS,
    NUM_ROWS,
    Do,
    Frozen,
    Pair,
    State,
    assert_as_plain,
    is_tensor,
    leaves,
    loss_of,
    rows,
    three_stages,
    train,
)
from tests.members import FACES, over_all_ways


def keeps_flags(w: Tensor, value: tuple[Tensor, ...]) -> Tensor:
    """Uses tensors that arrive as they left: differentiable or not."""
    differentiable, detached, integer = value
    assert differentiable.requires_grad
    assert not detached.requires_grad
    assert not integer.requires_grad
    return w * differentiable * detached + integer


def unless_same(w: Tensor, value: tuple[Tensor, Tensor]) -> Tensor:
    assert value[0] is value[1], "one tensor has become two"
    return w * value[0] * value[1]


def spectrum(w: Tensor, value: Tensor) -> Tensor:
    assert value.is_complex()
    return torch.fft.ifft(value * torch.polar(w, w)).real


# What the first layer sends, and what the last makes of it. An Identity stands between the two: a
# stage that returns its very input.
BOUNDARIES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Tensor, Any], Any]]] = {
    "tensor": (lambda w, x: w * x, lambda w, v: w * v),
    "bool mask": (lambda w, x: (x > 0, w * x), lambda w, v: (w * v[1]).masked_fill(v[0], 0.25)),
    "integers": (
        lambda w, x: (w * x, x.argsort(dim=1)),
        lambda w, v: (w * v[0]).gather(1, v[1]),
    ),
    "None and plain values": (
        lambda w, x: (None, w * x, 3, 0.5, "tanh", True),
        lambda w, v: getattr(torch, v[4])(w * v[1] ** v[2] * v[3]) if v[5] else v[0],
    ),
    "list": (lambda w, x: [w * x, x, [x * 2]], lambda w, v: w * v[0] + v[1] * v[2][0]),
    "dict": (
        lambda w, x: {"a": w * x, "b": {"c": x, "d": [x > 0, None]}},
        lambda w, v: w * v["a"] * v["b"]["c"] * v["b"]["d"][0],
    ),
    "ordered dict": (
        lambda w, x: OrderedDict(second=w * x, first=x),
        lambda w, v: torch.stack([w * part for part in v.values()]).cumsum(0)[0],
    ),
    "dataclass": (
        lambda w, x: State(w * x, x > 0, {"k": x, "n": 2}),
        lambda w, v: (w * v.hidden + v.extra["k"] * v.extra["n"]).masked_fill(v.mask, 0.5),
    ),
    "frozen dataclass in a tuple": (
        lambda w, x: (Frozen(w * x, 3.0), [State(x)]),
        lambda w, v: w * v[0].hidden * v[0].scale + v[1][0].hidden,
    ),
    "named tuple": (
        lambda w, x: Pair(w * x, x.argmax(dim=1)),
        lambda w, v: w * v.hidden + v.index.unsqueeze(1),
    ),
    "without grad": (lambda w, x: (w * x, (w * x).detach(), x.long()), keeps_flags),
    "transposed": (lambda w, x: torch.outer(w, x[:, 0]).T, lambda w, v: w * v.contiguous()),
    "every other": (lambda w, x: (w * x).repeat(1, 2)[:, ::2], lambda w, v: w * v),
    "expanded columns": (lambda w, x: (w * x)[:, :1].expand(-1, 6), lambda w, v: w * v),
    "expanded rows": (
        lambda w, x: (x, (w * 2).expand(len(x), 6)),
        lambda w, v: w * v[0] * v[1],
    ),
    "0-dim": (lambda w, x: (w.sum(), x, x.new_tensor(3.0)), lambda w, v: w * v[0] * v[1] * v[2]),
    "a parameter": (lambda w, x: (w, x), lambda w, v: w * v[0] * v[1]),
    "complex": (lambda w, x: torch.fft.fft(w * x), spectrum),
    "conjugated": (lambda w, x: torch.fft.fft(w * x).conj(), spectrum),
    "bf16": (
        lambda w, x: (w * x).bfloat16(),
        lambda w, v: w * (v * v).double(),
    ),
    "no elements": (lambda w, x: (w * x, x[:, :0]), lambda w, v: torch.cat([w * v[0], v[1]], 1)),
    "its input": (lambda w, x: x, lambda w, v: w * v),
    "its input twice": (lambda w, x: (x, x), unless_same),
    "one tensor twice": (lambda w, x: (w * x,) * 2, unless_same),
    "one tensor twice, written to": (
        lambda w, x: (w * x,) * 2,
        lambda w, v: v[0].mul_(2) * w + v[1],
    ),
    "a tensor and its view": (
        lambda w, x: (lambda y: (y, y[:, :3], y.T))(w * x),
        lambda w, v: w * v[0] + (v[1].repeat(1, 2) * v[2].T),
    ),
}


@pytest.mark.parametrize("asks", [True, False], ids=["input asks", "input does not"])
@pytest.mark.parametrize("name", BOUNDARIES)
@over_all_ways
def test_whatever_crosses_a_boundary(face, schedule, checkpoint, name, asks):
    first, last = BOUNDARIES[name]
    module = three_stages(Do(first), Do(last))
    target = torch.zeros(NUM_ROWS)
    assert_as_plain(module, (face, schedule, checkpoint), rows(asks), target)


LAYOUTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Tensor, Any], Tensor]]] = {
    "sparse": (lambda w, x: (w * x).relu().to_sparse(), lambda w, v: w * v.to_dense()),
    "sparse rows": (lambda w, x: (w * x).relu().to_sparse_csr(), lambda w, v: w * v.to_dense()),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", LAYOUTS)
@over_all_ways
def test_layouts_without_strides_cross_a_boundary(face, schedule, checkpoint, name):
    first, last = LAYOUTS[name]
    module = three_stages(Do(first), Do(last))
    assert_as_plain(module, (face, schedule, checkpoint), rows(), torch.zeros(NUM_ROWS))


def reachable_parameters(value: Any) -> list[Tensor]:
    """The parameters in the graph behind the tensors of a value."""
    nodes = [leaf.grad_fn for leaf in leaves(value) if is_tensor(leaf)]
    found = []
    while nodes:
        if (node := nodes.pop()) is not None:
            found += [node.variable] if hasattr(node, "variable") else []
            nodes += [following for following, _ in node.next_functions]
    return [tensor for tensor in found if isinstance(tensor, nn.Parameter)]


# A tensor that crossed hidden in some object took its graph along: the last stage's backward then
# ran through all stages, in one worker, and what it needed was held twice.
@pytest.mark.parametrize("name", BOUNDARIES)
@pytest.mark.parametrize("face", FACES)
def test_no_graph_crosses_a_boundary(face, name):
    seen = []

    class Looks(nn.Module):
        def forward(self, value: Any) -> Any:
            seen.extend(reachable_parameters(value))
            return value

    first, last = BOUNDARIES[name]
    model = GPipe(nn.Sequential(Do(first), Looks(), Do(last)), 3, CHUNKS)
    train(model, face, rows(), torch.zeros(NUM_ROWS), loss_of)
    assert not seen


# A bf16 gradient of the same rows is the same number, but float32 sums depend on their order.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@over_all_ways
def test_layers_of_any_precision(face, schedule, checkpoint, dtype):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(dtype)
    limit = max(1e-5, 4 * torch.finfo(dtype).eps)
    x = rows(requires_grad=False).to(dtype)
    model = GPipe(module, 3, CHUNKS, schedule=schedule, checkpoint=checkpoint)
    expected, expected_gradients = train(module, "backward", x, x, loss_of)
    output, gradients = train(model, face, x, x, loss_of)
    assert output.dtype is dtype
    for mine, other in zip([output, *gradients], [expected, *expected_gradients], strict=True):
        assert mine.dtype is other.dtype
        scale = other.abs().max().item()
        torch.testing.assert_close(mine, other, rtol=0, atol=limit * scale)


# The bits of a kernel may depend on how its input lies in memory, so that must not change on the
# way: neither at a boundary, nor where a copy is made for an in-place layer.
@over_all_ways
def test_strides_travel_with_the_values(face, schedule, checkpoint):
    seen = []

    class SeesStrides(nn.Module):
        def forward(self, values: tuple[Tensor, ...]) -> Tensor:
            seen.append([value.stride() for value in values])
            return sum(value.reshape(len(value), -1).sum(dim=1) for value in values)

    class Makes(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            image = x.reshape(-1, 2, 3, 1).to(memory_format=torch.channels_last)
            return image, x[:, :1].expand(-1, 6), (2 * x.T).T, torch.stack([x, x], dim=2)[..., 0]

    module = nn.Sequential(Makes(), nn.Identity(), SeesStrides())
    x = rows()
    module(x)
    expected = seen.pop()
    model = GPipe(module, 3, 1, schedule=schedule, checkpoint=checkpoint)
    for _ in range(2):
        train(model, face, x, x, loss_of)
    assert seen
    assert all(strides == expected for strides in seen)


# The same on the way back: a leaf's gradient is laid out as the leaf, whatever came from behind.
# One layer more in a stage, and the sum over a gradient was taken in another order.
@over_all_ways
def test_strides_travel_with_the_gradients(face, schedule, checkpoint):
    seen = []

    class SeesStrides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            y.register_hook(lambda gradient: seen.append(gradient.stride()))
            return y

    module = nn.Sequential(
        Do(lambda w, x: w * x),
        SeesStrides(),
        Do(lambda w, x: (w.unsqueeze(1) * x.mT.contiguous()).mT),
    )
    x = rows()
    loss_of(module(x)).backward()
    module.zero_grad()
    expected = seen.pop()
    assert expected == (1, NUM_ROWS)
    model = GPipe(module, 3, 1, schedule=schedule, checkpoint=checkpoint)
    train(model, face, x, x, loss_of)
    assert seen == [expected]
