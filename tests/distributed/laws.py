"""Trains a case on the processes of a mesh, in threads or as it is, and compares."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe import GPipe
from tests.distributed.law_case import Case
from tests.distributed.law_cases import CASES
from tests.distributed.team import Team, mesh
from tests.laws.values import inputs_of, is_tensor, leaves
from tests.members import relative_difference

__all__ = ["Record", "Way", "assert_as_in_threads", "assert_as_plain", "piped", "threaded"]

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}  # of the relative difference


class Way(NamedTuple):
    """How it is trained: four stages or two."""

    schedule: str
    num_workers: int
    num_stages: int
    checkpoint: str

    def __str__(self) -> str:
        return f"{self.schedule}-{self.num_workers}x{self.num_stages}-{self.checkpoint}"


class Record(NamedTuple):
    """What was seen of a training, a list entry per step."""

    losses: list[Tensor]
    outputs: list[Any]
    gradients: list[dict[str, Tensor | None]]
    by_input: list[list[Tensor | None]]
    generators: list[Tensor]
    state: dict[str, Tensor]

    @classmethod
    def empty(cls) -> Self:
        return cls([], [], [], [], [], {})


class Plain(nn.Sequential):
    """A plain model with the face of a GPipe."""

    def step(
        self,
        x: Any,
        y: Any,
        loss_fn: Callable[..., Any],
        *,
        loss_reduction: str = "mean",
        loss_scale: float = 1.0,
        return_output: bool = False,
    ) -> "Plain.Result":
        output = self(x)
        loss = loss_fn(output, y)
        if loss_reduction == "weighted" and isinstance(loss, tuple):
            loss = loss[0] / loss[1]
        (loss * loss_scale).backward()
        return Plain.Result(loss.detach(), output if return_output else None)

    class Result(NamedTuple):
        loss: Tensor
        output: Any


@contextmanager
def piped(module: nn.Sequential, way: Way, **options: Any) -> Iterator[GPipe]:
    """In a rank: this worker's part of the model."""
    model = GPipe(
        module,
        way.num_stages,
        schedule=way.schedule,
        checkpoint=way.checkpoint,
        mesh=mesh(),
        **{"chunks": 5, **options},
    )
    yield model
    dist.barrier()  # nothing is on its way any more
    assert model._layout.pipe is not None
    model._layout.pipe.close()  # or hundreds of models have thousands of threads


def on_mesh(rank: int, name: str, way: Way) -> Record:
    """In a rank: train; only the ends of the pipe know the data."""
    case = CASES[name]
    with piped(case.module(), way, **case.options) as model:
        has_target = rank == way.num_workers - 1
        return trained(model, case, has_input=rank == 0, has_target=has_target)


def threaded(module: nn.Sequential, way: Way, **options: Any) -> GPipe:
    """The same model with all workers in one process."""
    return GPipe(
        module,
        way.num_stages,
        schedule=way.schedule,
        checkpoint=way.checkpoint,
        devices=["cpu"] * way.num_workers,
        **{"chunks": 5, **options},
    )


@cache
def in_threads(name: str, way: Way) -> Record:
    case = CASES[name]
    return trained(threaded(case.module(), way, **case.options), case)


@cache
def in_plain(name: str) -> Record:
    case = CASES[name]
    module = Plain(OrderedDict(case.module().named_children()))
    return trained(module, case)


def assert_as_in_threads(team: Team, name: str, way: Way) -> list[Record]:
    """All is the same to the last bit, on whichever rank it is."""
    records = team.call(on_mesh, name, way)
    expected = in_threads(name, way._replace(checkpoint="never"))  # all modes are to be as this
    for record in records:
        assert_same_bits(record.losses, expected.losses)
        assert_same_bits(record.generators, expected.generators)
        for mine, other in zip(record.gradients, expected.gradients, strict=True):
            here = [name for name in mine if record is records[-1] or "loss_fn" not in name]
            assert_same_bits([mine[name] for name in here], [other[name] for name in here])
        assert_same_bits(record.state, {name: expected.state[name] for name in record.state})
    assert_same_bits(records[0].by_input, expected.by_input)
    assert_same_bits(records[-1].outputs, expected.outputs)
    assert not any(leaves([record.outputs for record in records[:-1]]))
    assert {name for each in records for name in each.state} == set(expected.state)
    assert names_of(*records) == names_of(expected)
    return records


def names_of(*records: Record) -> set[str]:
    """The names under which there are gradients, or could be."""
    return {name for record in records for name in record.gradients[0]}


def assert_same_bits(mine: Any, other: Any) -> None:
    pairs = zip(leaves(mine), leaves(other), strict=True)
    assert all(_same(*pair) for pair in pairs), (mine, other)


def _same(mine: Any, other: Any) -> bool:
    if not is_tensor(mine):
        return type(mine) is type(other) and mine == other
    alike = mine.dtype is other.dtype and mine.stride() == other.stride()
    return alike and torch.equal(mine, other)


def assert_as_plain(records: list[Record], name: str) -> None:
    """Losses and gradients are those of the plain model, but for rounding."""
    expected = in_plain(name)
    for record in records:
        for loss, plain in zip(record.losses, expected.losses, strict=True):
            assert_close(loss, plain)
        for mine, other in zip(record.gradients, expected.gradients, strict=True):
            for parameter in mine:
                if record is records[-1] or "loss_fn" not in parameter:
                    assert_close(mine[parameter], other[parameter])
    for mine, other in zip(leaves(records[0].by_input), leaves(expected.by_input), strict=True):
        assert_close(mine, other)


def assert_close(mine: Tensor | None, other: Tensor | None) -> None:
    if mine is None or other is None:
        assert mine is other
    else:
        limit = LIMITS[torch.empty(0, dtype=mine.dtype).real.dtype]
        assert relative_difference(mine, other) <= limit


def trained(model: Any, case: Case, *, has_input: bool = True, has_target: bool = True) -> Record:
    """Train a model of any kind and see what comes of it."""
    torch.manual_seed(5)
    loss_fn, seen = case.loss(), Record.empty()
    named = _named(model, loss_fn)
    optimizer = torch.optim.Adam(dict.fromkeys(named.values()), lr=0.01) if named else None
    with case.around():
        for x, y in case.batches():
            x, y = x if has_input else None, y if has_target else None
            arguments = {"return_output": True, **case.arguments}
            result = model.step(x, y, loss_fn, **arguments)
            seen.losses.append(result.loss.clone())
            seen.outputs.append(_without_graph(result.output))
            seen.gradients.append({name: _copied(each.grad) for name, each in named.items()})
            seen.by_input.append([leaf.grad for leaf in inputs_of(x)])
            seen.generators.append(torch.get_rng_state())
            if optimizer is not None and not case.accumulates:
                optimizer.step()
                optimizer.zero_grad()
    seen.state.update(copy.deepcopy(model.state_dict()))
    return seen


def _named(model: nn.Module, loss_fn: Any) -> dict[str, nn.Parameter]:
    """All parameters, a shared one by each of its names."""
    named = dict(model.named_parameters(remove_duplicate=False))
    if isinstance(loss_fn, nn.Module):
        named |= {f"loss_fn.{name}": each for name, each in loss_fn.named_parameters()}
    return named


def _copied(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def _without_graph(output: Any) -> Any:
    if output is None:
        return ()
    return [each.detach().clone() if is_tensor(each) else each for each in leaves(output)]
