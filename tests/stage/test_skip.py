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

from gpipe.stage import skip
from gpipe.stage.skip import Namespace, SkipKey, SkipStore, pop, skippable, stash, using
from gpipe.stage.skip_route import SkipRoute, skip_routes

EARLY, LATE = SkipKey(None, "early"), SkipKey(None, "late")


@skippable(stash=["early"])
class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, input: Tensor) -> Any:
        yield stash("early", input * 2)
        return self.linear(input)


@skippable(pop=["early"])
class Up(nn.Module):
    def forward(self, input: Tensor) -> Any:
        early = yield pop("early")
        return input if early is None else input + early


@skippable(stash=["a", "b"])
class StashTwo(nn.Module):
    def forward(self, input: Tensor) -> Any:
        yield stash("a", input + 1)
        yield stash("b", input + 10)
        return input


@skippable(pop=["a", "b"])
class PopTwo(nn.Module):
    def forward(self, input: Tensor) -> Any:
        return (yield pop("b")) - (yield pop("a"))


class Undecorated(nn.Module):
    def forward(self, input: Tensor) -> Any:
        yield stash("early", input)
        return input


class Fails(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        raise ArithmeticError


def rows() -> Tensor:
    return torch.arange(8.0).reshape(2, 4)


def layer(forward: Callable[[Tensor], Any], **names: list[str]) -> nn.Module:
    """One layer of a new skippable class."""
    cls = type("Some", (nn.Module,), {"forward": lambda self, input: forward(input)})
    return skippable(**names)(cls)()


def isolated(*layers: Any) -> list[Any]:
    """The layers, in a namespace of their own."""
    namespace = Namespace()
    return [layer.isolate(namespace) for layer in layers]


def by_hand(down: Down, input: Tensor) -> Tensor:
    """What a Sequential of the layer, Tanh and Up computes."""
    return torch.tanh(down.linear(input)) + input * 2


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


# ---- names that do not agree ----


def yields(*requests: Any) -> Callable[[Tensor], Iterator[Any]]:
    def forward(input: Tensor) -> Iterator[Any]:
        with torch.no_grad():  # which must end where a request is refused
            yield from requests
        return input

    return forward


EARLY_TWICE = (stash("early", None), stash("early", None))


@pytest.mark.parametrize(
    ("error", "message", "requests"),
    [
        (
            ValueError,
            r"Some yields stash\('late'\), .* stash=\['early'\].*Add",
            [stash("late", None)],
        ),
        (ValueError, r"yields pop\('early'\), but declares pop=\[\]", [pop("early")]),
        (ValueError, "each to be used once", EARLY_TWICE),
        (ValueError, r"Some declares stash=\['early'\], but did not stash it. Do it", []),
        (TypeError, r"yields an object of type int\. Yield only", [3]),
    ],
)
def test_a_forward_that_does_not_keep_to_its_names_is_refused(
    error: type[Exception], message: str, requests: list[Any]
) -> None:
    with pytest.raises(error, match=message) as kept:
        layer(yields(*requests), stash=["early"])(rows())

    # Left suspended, the forward would have switched gradients off for the whole thread.
    assert torch.is_grad_enabled()
    del kept


def test_a_forward_without_yields_must_not_declare() -> None:
    with pytest.raises(ValueError, match=r"declares pop=\['early'\], but did not pop it"):
        layer(lambda input: input, pop=["early"])(rows())


@pytest.mark.parametrize(
    ("error", "message", "wrong"),
    [
        (TypeError, r"Skip 'x' is of type tuple\. Stash one tensor", lambda: stash("x", (rows(),))),
        (TypeError, "Pass a list of names", lambda: skippable(stash="early")),
        (TypeError, "Pass a list of names", lambda: skippable(Down)),
        (TypeError, "Pass a list of names", lambda: skippable(pop=[1])),
        (ValueError, "on both sides", lambda: skippable(stash=["x"], pop=["x"])),
        (TypeError, r"int.* is no nn\.Module", lambda: skippable()(int)),
        (TypeError, r"Pass a Namespace\(\)", lambda: Down().isolate("early")),
        (ValueError, r"\['x'\]\..*: \['early'\]", lambda: Down().isolate(Namespace(), ["x"])),
    ],
)
def test_a_wrong_argument_is_refused(
    error: type[Exception], message: str, wrong: Callable[[], Any]
) -> None:
    with pytest.raises(error, match=message):
        wrong()


# ---- routes ----


def test_routes_join_the_layers() -> None:
    (down, up), (two, pop_two) = isolated(Down(), Up()), isolated(StashTwo(), PopTwo())

    routes = skip_routes([down, nn.Tanh(), two, up, pop_two])

    assert [(key.name, *way) for key, *way in routes] == [("early", 0, 3), ("a", 2, 4), ("b", 2, 4)]
    assert routes[1].key.namespace is routes[2].key.namespace is not routes[0].key.namespace


def test_only_some_names_may_be_isolated() -> None:
    namespace = Namespace()
    layers = [StashTwo().isolate(namespace, only=iter("a")), PopTwo().isolate(namespace, ["a"])]

    keys = [route.key for route in skip_routes(layers)]

    assert keys == [SkipKey(namespace, "a"), SkipKey(None, "b")]


def test_nested_layers_have_routes() -> None:
    layers = [nn.Sequential(nn.Tanh(), nn.Sequential(Down())), nn.Tanh(), nn.Sequential(Up())]

    assert skip_routes(layers) == [SkipRoute(EARLY, 0, 2)]


def test_a_skip_inside_a_layer_has_no_route() -> None:
    layers = [nn.Sequential(Down(), nn.Tanh(), Up()), nn.Sequential(*isolated(Down(), Up()))]

    assert skip_routes(layers) == []


@pytest.mark.parametrize(
    ("message", "make"),
    [
        (r"'early' is stashed by layer 1 \(Down\) and never popped\. Pop it", [nn.Tanh, Down]),
        (r"'early' is popped by layer 1 \(Up\) and never stashed\. Stash it", [nn.Tanh, Up]),
        (
            r"popped by layer 0 \(Sequential, in its Up\) before layer 1 \(Down\) stashes it",
            [lambda: nn.Sequential(Up()), Down],
        ),
        (r"stashed twice, by layer 0 \(Down\) and layer 1 \(Down\)\. .*Names", [Down, Down, Up]),
        (r"popped twice, by layer 1 \(Up\) and layer 2 \(Up\)\. .*Namespace", [Down, Up, Up]),
        (r"popped twice, by layer 1 \(S", [Down, lambda: nn.Sequential(Up(), Up())]),
        (r"'early' \(isolated\) .* both in one Names", [lambda: Down().isolate(Namespace())]),
    ],
)
def test_a_skip_that_is_no_pair_is_refused(message: str, make: list[Callable[[], Any]]) -> None:
    with pytest.raises(ValueError, match=message):
        skip_routes([make_layer() for make_layer in make])


def test_a_forgotten_decorator_is_refused() -> None:
    with pytest.raises(TypeError, match=r"layer 1 \(Undecorated\) yields.*Put @skippable"):
        skip_routes([nn.Tanh(), Undecorated()])


# ---- the store of a stage and micro-batch ----


def test_a_store_gives_what_arrived_and_keeps_what_is_left() -> None:
    before = SkipStore()
    with using(before):
        output = Down()(rows())
    after = SkipStore(before.left())
    with using(after):
        assert torch.equal(Up()(output), output + 2 * rows())

    assert torch.equal(before.left()[EARLY], 2 * rows())
    assert after.left() == {}


def test_a_store_forgets_what_is_taken() -> None:
    arrived, stashed = rows() + 0, rows() + 0
    refs = weakref.ref(arrived), weakref.ref(stashed)
    store = SkipStore({EARLY: arrived})
    store.put(LATE, stashed)
    del arrived, stashed

    assert all(store.take(key) is ref() for key, ref in zip((EARLY, LATE), refs, strict=True))

    assert [ref() for ref in refs] == [None, None]
    assert store.left() == {}


@pytest.mark.parametrize(
    ("message", "arrived", "layers"),
    [
        ("'early' is popped, but was not stashed", {LATE: None}, [Up]),
        ("or has been popped before", {EARLY: None}, [Up, Up]),
        ("'early' is stashed twice before it is popped.*Namespace", {}, [Down, Down]),
        ("'early' is stashed twice", {EARLY: None}, [Down]),
    ],
)
def test_a_store_is_strict(message: str, arrived: Any, layers: list[Callable[[], Any]]) -> None:
    with using(SkipStore(arrived)), pytest.raises(ValueError, match=message):
        nn.Sequential(*(make() for make in layers))(rows())


def test_stores_nest_and_are_put_back_and_are_of_this_thread() -> None:
    outer, inner, default = SkipStore(), SkipStore(), skip._thread.store
    thread = threading.Thread(target=lambda: PopTwo()(StashTwo()(rows())))
    with using(outer):
        with pytest.raises(ArithmeticError), using(inner):
            nn.Sequential(Down(), Fails())(rows())
        thread.start()
        thread.join()
        StashTwo()(rows())

    assert list(inner.left()) == [EARLY]
    assert [key.name for key in outer.left()] == ["a", "b"]
    assert skip._thread.store is default
