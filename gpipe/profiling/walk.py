"""The way of the sample through all layers."""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.nn import Parameter

from gpipe.costs import LayerMemory
from gpipe.profiling.attempt import Attempt, Call
from gpipe.profiling.bar import Bar
from gpipe.profiling.casts import casts_forgotten, kept_bytes
from gpipe.profiling.ledger import Ledger
from gpipe.profiling.observation import Observation, observe
from gpipe.profiling.stand_in import Copier, standing_in
from gpipe.profiling.subject import Subject
from gpipe.profiling.trace import Trace, traces
from gpipe.profiling.undisturbed import gradients_set_aside
from gpipe.stage.boundary import Boundary

__all__ = ["Measure", "Place", "Trial", "Visit", "Visitor", "Walk", "visitor", "walk"]

T = TypeVar("T")

Trial = Callable[[], Attempt]
"""Makes one attempt after another at the same layer and rows."""

Measure = Callable[[Sequence[Trial]], T]
"""Finds something out about a layer, given a trial for each lane."""


class Place(NamedTuple):
    """A layer, and what comes to it.

    Attributes:
        layer: The layer.
        modules: All that computes there: the layer, and a loss behind it.
        calls: What is called, for each lane.
        inputs: With what, for each lane.
        same: For each input the first one in its storage; None: it is no activation.
    """

    layer: nn.Module
    modules: list[nn.Module]
    calls: list[Call]
    inputs: list[Boundary]
    same: list[int | None]


class Visit(NamedTuple, Generic[T]):
    """What was seen at a place.

    Attributes:
        traces: What the layer did with memory, for each lane.
        outputs: What it gave, for each lane.
        cast_bytes: What autocast keeps of its parameters.
        found: What was measured.
    """

    traces: tuple[Trace, ...]
    outputs: list[Boundary]
    cast_bytes: int
    found: T


Visitor = Callable[[Place], Visit[T]]


class Walk(NamedTuple, Generic[T]):
    """What was seen on the way through all layers.

    Attributes:
        memory: What the layers do with memory.
        cast_bytes: What autocast keeps of the parameters of each.
        found: What was measured at each.
    """

    memory: LayerMemory
    cast_bytes: list[int]
    found: list[T]


def walk(subject: Subject, moved: Copier, visit: Visitor[T], progress: bool = False) -> Walk[T]:
    """Visit layer after layer, each with what the one before gave.

    Args:
        subject: The model and the rows.
        moved: Takes a tensor of the sample to where the layers are.
        visit: What is done at each.
        progress: Whether a bar is shown.

    Raises:
        BaseException: What a layer raised, with a note of which one it was.
    """
    lanes = subject.lanes(moved)
    ledger = Ledger([lane.value for lane in lanes], subject.rows)
    found: list[T] = []
    cast_bytes: list[int] = []
    bar = Bar(len(subject.layers), progress)
    with bar, gradients_set_aside(subject.parameters):
        for index, pops in enumerate(subject.pops):
            inputs = [lane.inputs(pops) for lane in lanes]
            calls = subject.calls(index, lanes)
            modules, same = subject.modules(index), ledger.same(pops)
            place = Place(subject.layers[index], modules, calls, inputs, same)
            try:
                seen = visit(place)
            except BaseException as error:
                error.add_note(f"gpipe: in {subject.describe(index)}, while it was profiled")
                raise
            ledger.add(seen.traces, seen.outputs[0], pops)
            for lane, outputs in zip(lanes, seen.outputs, strict=True):
                lane.advance(outputs, pops)
            found.append(seen.found)
            cast_bytes.append(seen.cast_bytes)
            bar.update()
    return Walk(ledger.memory(), cast_bytes, found)


def visitor(device_type: str, copied: Copier, measure: Measure[T]) -> Visitor[T]:
    """Visits a layer whose parameters and buffers are copies, and measures something there."""

    def visit(place: Place) -> Visit[T]:
        with casts_forgotten(device_type), standing_in(place.modules, copied) as parameters:
            looks = [
                _look(Attempt(call, inputs, parameters))
                for call, inputs in zip(place.calls, place.inputs, strict=True)
            ]
            found = measure(_trials(place, parameters))
            cast_bytes = kept_bytes(parameters)
        observations, outputs = zip(*looks, strict=True)
        return Visit(traces(observations, place.same), list(outputs), cast_bytes, found)

    return visit


def _look(attempt: Attempt) -> tuple[Observation, Boundary]:
    observation = observe(attempt)
    return observation, attempt.outputs().detached()


def _trials(place: Place, parameters: list[Parameter]) -> list[Trial]:
    totals: dict[int, Tensor] = {}

    def trial(call: Call, inputs: Boundary) -> Trial:
        return lambda: Attempt(call, inputs, parameters, totals)

    return [trial(*pair) for pair in zip(place.calls, place.inputs, strict=True)]
