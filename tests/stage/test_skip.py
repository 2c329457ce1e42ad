import copy
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gpipe.stage.skip import SkipKey, SkipStore, pop, skippable, stash, using
from gpipe.stage.skip_route import skip_routes
from tests.stage.skipping import (
    Down,
    Fails,
    PopTwo,
    Undecorated,
    Up,
    by_hand,
    isolated,
    layer,
    rows,
)

EARLY, LATE = SkipKey(None, "early"), SkipKey(None, "late")


# ---- in a plain Sequential ----


def test_the_gradients_are_those_of_the_model_written_by_hand() -> None:
    model, x, y = nn.Sequential(Down(), nn.Tanh(), Up()), rows(), rows()
    down = copy.deepcopy(model[0])

    model(x.requires_grad_()).square().sum().backward()
    by_hand(down, y.requires_grad_()).square().sum().backward()

    assert torch.equal(x.grad, y.grad)
    for parameter, expected in zip(model.parameters(), down.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


def test_a_layer_may_use_several_skips() -> None:
    def forward(input: Tensor) -> Iterator[Any]:
        early = yield pop("early")
        yield stash("a", early)
        yield stash("b", input)
        return early

    model = nn.Sequential(Down(), layer(forward, stash=["a", "b"], pop=["early"]), PopTwo())

    assert torch.equal(model(rows()), model[0].linear(rows()) - 2 * rows())
    assert [route[1:] for route in skip_routes(model)] == [(0, 1), (1, 2), (1, 2)]


@pytest.mark.parametrize("output", [None, (1, 2), {"a": 1}, (), StopIteration])
def test_none_may_be_stashed_and_anything_returned(output: object) -> None:
    def forward(input: Tensor) -> Iterator[Any]:
        yield stash("early", None)
        return output

    assert layer(forward, stash=["early"])(rows()) is output
    assert torch.equal(Up()(rows()), rows())


def test_a_forward_need_not_yield() -> None:
    assert torch.equal(layer(lambda input: input + 1)(rows()), rows() + 1)


def test_each_thread_has_skips_of_its_own() -> None:
    down, up, met = Down(), Up(), threading.Barrier(2, timeout=10)
    results: dict[float, float] = {}

    def work(value: float) -> None:
        down(torch.full((1, 4), value))
        met.wait()  # both have stashed
        results[value] = up(torch.zeros(1, 4))[0, 0].item()

    threads = [threading.Thread(target=work, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == {1.0: 2.0, 2.0: 4.0}


def test_a_forward_that_failed_midway_does_not_hurt_the_next() -> None:
    # In a store that refuses a second stash, every forward after this one would fail.
    down, up = Down(), Up()
    with pytest.raises(ArithmeticError):
        nn.Sequential(down, Fails(), up)(rows())

    assert torch.equal(nn.Sequential(down, nn.Tanh(), up)(rows()), by_hand(down, rows()))


def test_a_popped_tensor_is_freed() -> None:
    refs: list[weakref.ref[Tensor]] = []

    def forward(input: Tensor) -> Iterator[Any]:
        tensor = input * 2
        refs.append(weakref.ref(tensor))
        yield stash("early", tensor)
        return input

    def is_freed(_: Tensor) -> bool:
        return refs[0]() is None

    assert nn.Sequential(layer(forward, stash=["early"]), Up(), layer(is_freed))(rows())


# ---- still an ordinary module class ----


def test_the_class_stays_itself() -> None:
    assert isinstance(Down(), Down)
    assert Down.__mro__ == (Down, nn.Module, object)
    assert repr(Up()) == "Up()"
    assert Down.forward.__qualname__ == "Down.forward"


def test_hooks_see_the_output() -> None:
    down, seen = Down(), []
    down.register_forward_hook(lambda module, args, output: seen.append(output))

    assert down(rows()) is seen[0]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_model_keep_their_pairs(again: Callable[[Any], Any]) -> None:
    (down, up), (inner_down, inner_up) = isolated(Down(), Up()), isolated(Down(), Up())
    model = nn.Sequential(down, inner_down, nn.Tanh(), inner_up, up)

    other = again(model)

    assert [route[1:] for route in skip_routes(other)] == [(0, 4), (1, 3)]
    assert not {r.key for r in skip_routes(other)} & {r.key for r in skip_routes(model)}
    assert torch.equal(other(rows()), model(rows()))


def test_a_subclass_has_the_names_of_its_parent() -> None:
    class Own(Down):
        def forward(self, input: Tensor) -> Any:
            yield stash("early", input * 3)
            return input

    class CallsParent(Down):
        def forward(self, input: Tensor) -> Any:
            return super().forward(input) + 1

    calls = CallsParent()
    expected = calls.linear(rows()) + 1 + 2 * rows()
    assert torch.equal(nn.Sequential(Own(), Up())(rows()), 4 * rows())
    assert torch.equal(nn.Sequential(calls, Up())(rows()), expected)


def test_a_decorated_subclass_may_call_its_parent() -> None:
    @skippable(stash=["early", "late"])
    class Both(Down):
        def forward(self, input: Tensor) -> Any:
            output = super().forward(input)
            yield stash("late", output)
            return output

    store = SkipStore()
    with using(store):
        output = Both()(rows())

    assert list(store.left()) == [EARLY, LATE]
    assert store.left()[LATE].data_ptr() == output.data_ptr()  # a view of it


def test_the_class_keeps_its_own_subclass_hook() -> None:
    known = []

    @skippable(stash=["early"])
    class Registered(Undecorated):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            known.append((cls.__name__, kwargs))

    class Child(Registered, color="red"):
        forward = Undecorated.forward

    assert known == [("Child", {"color": "red"})]
    assert torch.equal(nn.Sequential(Child(), Up())(rows()), 2 * rows())


def test_a_class_that_torch_derives_is_skippable() -> None:
    # `parametrize` and FSDP2 replace the class of an instance by one that they derive from it.
    down, up = isolated(Down(), Up())
    down.scale = nn.Parameter(torch.ones(1))
    parametrize.register_parametrization(down, "scale", nn.Identity())

    assert type(down) is not Down
    assert [route[1:] for route in skip_routes([down, up])] == [(0, 1)]
    assert torch.equal(up(down(rows())), down.linear(rows()) + 2 * rows())


@pytest.mark.slow  # the first compilation of a process takes seconds
def test_a_model_with_skips_compiles_into_one_graph() -> None:
    down, up = isolated(Down(), Up())
    model = nn.Sequential(down, nn.Tanh(), up)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    first, store = torch.compile(down, backend="eager", fullgraph=True), SkipStore()

    assert torch.equal(compiled(rows()), by_hand(down, rows()))
    with using(store):
        assert torch.equal(compiled(rows()), by_hand(down, rows()))
        first(rows())

    assert [tensor.tolist() for tensor in store.left().values()] == [(2 * rows()).tolist()]
