"""What a process of a mesh is to its user: evaluation, names, hooks, memory, refusals."""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe, is_recomputing
from gpipe.errors import StageError
from tests.distributed.laws import Way, assert_same_bits, piped, threaded
from tests.distributed.team import Team, mesh
from tests.members import intra_op_threads, mlp

pytestmark = pytest.mark.distributed

WAYS = [
    Way("1f1b", 2, 2, "always"),
    Way("interleaved_1f1b", 2, 4, "except_last"),
    Way("looped_breadth_first", 2, 4, "never"),
]
over_ways = pytest.mark.parametrize("way", WAYS, ids=str)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with intra_op_threads(1):
        yield


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    team = Team(2)
    yield team
    team.close()


def rows(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, 6, generator=torch.Generator().manual_seed(seed))


def train(model: GPipe, rank: int, seed: int = 0, num_rows: int = 11) -> Tensor:
    """A step in a rank of two."""
    x, y = rows(num_rows, seed), rows(num_rows, seed + 1)
    return model.step(x if rank == 0 else None, y if rank == 1 else None, nn.MSELoss()).loss


def changing() -> nn.Sequential:
    """Has what an evaluation could spoil: statistics and random numbers."""
    return nn.Sequential(*mlp(4), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6))


def evaluated_between(rank: int, way: Way, evaluates: bool) -> tuple:
    """Outputs, and what three steps have made of the weights."""
    outputs = []
    with piped(changing(), way) as model:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for seed in range(3):
            train(model, rank, seed)
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                outputs.append(evaluated(model, rank))
        return outputs, model.state_dict()


def evaluated(model: GPipe, rank: int) -> list[Tensor | None]:
    """The output in four ways, and the loss."""
    x = rows(3) if rank == 0 else None
    training, y = model.training, rows(3) if rank == 1 else None
    model.eval()
    outputs = [model(x), model(x, broadcast_output=True)]
    with torch.inference_mode():
        outputs.append(model(x).clone() if rank == 1 else model(x))
    result = model.step(x, y, nn.MSELoss(), return_output=True)
    model.train(training)
    return [*outputs, result.output, result.loss]


def evaluated_in_threads(way: Way) -> list[list[Tensor]]:
    torch.manual_seed(0)
    model, found = threaded(changing(), way), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for seed in range(3):
        model.step(rows(11, seed), rows(11, seed + 1), nn.MSELoss())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        output, loss = model(rows(3)), model.step(rows(3), rows(3), nn.MSELoss()).loss
        found.append([output] * 4 + [loss])
        model.train()
    return found


@over_ways
def test_evaluation_changes_nothing(team, way):
    seeing, blind = (team.call(evaluated_between, way, evaluates) for evaluates in (True, False))
    assert_same_bits([state for _, state in seeing], [state for _, state in blind])
    expected = evaluated_in_threads(way)
    first, last = (outputs for outputs, _ in seeing)
    assert_same_bits(last, expected)
    assert_same_bits(first, [[None, whole, None, None, loss] for _, whole, _, _, loss in expected])


class Counts(nn.Linear):
    """Knows how often it was called, and why."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.calls: Counter[str] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.calls["recompute" if is_recomputing() else "forward"] += 1
        return super().forward(x)


def counted(model: GPipe, step: Callable[[], object]) -> dict[str, tuple]:
    """The calls of each layer and the hooks of each parameter, in two steps."""
    fired: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: fired.update([f"{name} hook"]))
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: fired.update([f"{name} after"])
        )
    step()
    step()
    own = [(name, each) for name, each in model.named_children() if isinstance(each, Counts)]
    calls = {name: dict(each.calls) for name, each in own}
    return calls | dict(fired)


def counted_on_mesh(rank: int, way: Way) -> dict[str, tuple]:
    with piped(nn.Sequential(*(Counts() for _ in range(4))), way) as model:
        return counted(model, lambda: train(model, rank))


# Laws 4 and 5.
@over_ways
def test_forwards_and_hooks_are_as_many_as_in_threads(team, way):
    model = threaded(nn.Sequential(*(Counts() for _ in range(4))), way)
    expected = counted(model, lambda: model.step(rows(11), rows(11), nn.MSELoss()))
    first, last = team.call(counted_on_mesh, way)
    assert first | last == expected
    assert not first.keys() & last.keys()
    assert {expected[name]["forward"] for name in "0123"} == {10}
    assert expected["0.weight hook"] == expected["3.bias after"] == 2


def looked_at(rank: int, way: Way) -> dict[str, object]:
    plain = mlp(6)
    torch.manual_seed(rank + 1)
    module = nn.Sequential(*(nn.Linear(6, 6) if i % 2 == 0 else nn.Tanh() for i in range(6)))
    with piped(module, way) as model:
        report = model.load_state_dict(plain.state_dict())
        own = model.state_dict()
        return {
            "length": len(model),
            "equal": {name: torch.equal(own[name], plain.state_dict()[name]) for name in own},
            "report": (report.missing_keys, report.unexpected_keys),
            "types": [type(layer).__name__ for layer in model],
            "last": type(model[-1]).__name__,
            "part": [type(layer).__name__ for layer in model[1:3]],
            "repr": repr(model),
        }


@over_ways
def test_each_rank_has_its_names_and_loads_its_part(team, way):
    both = team.call(looked_at, way)
    names = [name for each in both for name in each["equal"]]
    assert sorted(names) == sorted(mlp(6).state_dict())
    assert all(all(each["equal"].values()) for each in both)
    assert [each["report"] for each in both] == [([], [])] * 2
    assert [each["length"] for each in both] == [6, 6]
    for place, kinds in enumerate(zip(*(each["types"] for each in both), strict=True)):
        assert sorted(kinds) == sorted(["Elsewhere", type(mlp(6)[place]).__name__])
    for each in both:
        assert each["types"][-1] == each["last"]
        assert each["types"][1:3] == each["part"]
        assert "on worker" in each["repr"]


class Narrows(nn.Module):
    """How wide its output is depends on the values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x[:, :4] if x.sum() > 0 else x[:, :3])


class Total(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sum(dim=1, keepdim=True))


def narrowing() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Narrows(), nn.Tanh(), nn.Identity(), Total())


SIGNS = (1, -1, 1)


def narrowed(rank: int, way: Way, dynamic_shapes: bool) -> tuple[list[Tensor], list[Tensor]]:
    with piped(narrowing(), way, dynamic_shapes=dynamic_shapes) as model:
        losses = []
        for sign in SIGNS:
            x = rows(11).abs() * sign
            given = x if rank == 0 else None, x[:, :1] if rank == 1 else None
            losses.append(model.step(*given, nn.MSELoss()).loss)
        return losses, [each.grad for each in model.parameters()]


@over_ways
def test_shapes_may_depend_on_values_where_that_is_said(team, way):
    model = threaded(narrowing(), way)
    inputs = [rows(11).abs() * sign for sign in SIGNS]
    losses = [model.step(x, x[:, :1], nn.MSELoss()).loss for x in inputs]
    gradients = {tuple(each.grad.flatten().tolist()) for each in model.parameters()}
    both = team.call(narrowed, way, True)
    assert_same_bits([each for each, _ in both], [losses] * 2)
    mine = [tuple(each.flatten().tolist()) for _, own in both for each in own]
    assert set(mine) == gradients


def doubled(rank: int, way: Way) -> list[list[Tensor]]:
    """Weights of two models in one group, trained in turns or one after the other."""
    found = []
    for in_turns in (True, False):
        torch.manual_seed(0)
        with piped(changing(), way) as one, piped(changing(), way, chunks=3) as other:
            for seed in range(3 if in_turns else 6):
                for model in (one, other) if in_turns else (one,) if seed < 3 else (other,):
                    torch.manual_seed(seed % 3)
                    train(model, rank, seed % 3)
            found.append([each.grad for model in (one, other) for each in model.parameters()])
    return found


@over_ways
def test_two_models_take_turns_in_one_group(team, way):
    for in_turns, one_by_one in team.call(doubled, way):
        assert_same_bits(in_turns, one_by_one)


def call_the_model(model: GPipe, rank: int) -> None:
    model(rows(5) if rank == 0 else None)


def train_what_is_frozen(model: GPipe, rank: int) -> None:
    model.requires_grad_(False)
    train(model, rank)


def refused(rank: int, way: Way, use: Callable[[GPipe, int], None]) -> str:
    """What a rank says; whichever has said it first."""
    model = GPipe(mlp(4), way.num_stages, 5, schedule=way.schedule, mesh=mesh())
    with pytest.raises((RuntimeError, StageError)) as caught:
        use(model, rank)
    return str(caught.value)


FROZEN = ((), (0,), (0, 2), (2,), ())  # layers, by step


def unfreezing(model: GPipe, step: Callable[[], object]) -> list[dict[str, Tensor | None]]:
    """The gradients of steps in which other layers are frozen each time."""
    found = []
    for frozen in FROZEN:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(int(name[0]) not in frozen)
        step()
        found.append({name: each.grad for name, each in model.named_parameters()})
        model.zero_grad()
    return found


def unfreezing_on_mesh(rank: int, way: Way) -> list[dict[str, Tensor | None]]:
    with piped(mlp(6), way) as model:
        return unfreezing(model, lambda: train(model, rank))


# Fine-tuning unfreezes one layer after the other. What crosses a boundary has the same shape then,
# and asks for a gradient or does not.
@over_ways
def test_layers_may_be_frozen_between_steps(team, way):
    model = threaded(mlp(6), way)
    expected = unfreezing(model, lambda: model.step(rows(11), rows(11, 1), nn.MSELoss()))
    first, last = team.call(unfreezing_on_mesh, way)
    for one, other, whole in zip(first, last, expected, strict=True):
        mine = one | other
        assert_same_bits(mine, {name: whole[name] for name in mine})
        assert mine.keys() == whole.keys()


# These come last: what a rank refuses ends the job.
@pytest.mark.parametrize(
    ("use", "message"),
    [
        (call_the_model, "On a mesh the loss is taken on the last worker"),
        (train_what_is_frozen, "No gradient came out of this step"),
    ],
)
def test_all_ranks_refuse_alike(team, use, message):
    said = team.call(refused, WAYS[1], use)
    team.close()
    assert all(message in each for each in said)


def test_a_shape_that_depends_on_values_is_refused(team):
    with pytest.raises(Exception, match=r"A0>1\.0 carries .*\(3, 4\).*\(3, 3\).*dynamic_shapes"):
        team.call(narrowed, WAYS[0], False)
