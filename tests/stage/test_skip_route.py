"""Names that do not agree, the routes of skips, and where they wait."""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe.stage import skip
from gpipe.stage.skip import Namespace, SkipKey, SkipStore, pop, skippable, stash, using
from gpipe.stage.skip_route import SkipRoute, skip_routes
from tests.stage.skipping import (
    Down,
    Fails,
    PopTwo,
    StashTwo,
    Undecorated,
    Up,
    isolated,
    layer,
    rows,
)

EARLY, LATE = SkipKey(None, "early"), SkipKey(None, "late")


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
