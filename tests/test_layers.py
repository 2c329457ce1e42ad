"""Who may import whom: the table of the layers, read from the source, hidden imports included."""

import ast
import graphlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gpipe"


class Layer(NamedTuple):
    units: frozenset[str]
    may_import: frozenset[int]


def layer(units: str, may_import: Iterable[int]) -> Layer:
    return Layer(frozenset(units.split()), frozenset(may_import))


# A unit is a module or a folder right under gpipe/; inside one, everything may import everything.
LAYERS = [
    layer("errors arguments units", ()),
    layer("schedule costs", range(1)),
    layer("partition timeline", range(2)),
    layer("simulate", range(3)),
    layer("plan", range(4)),
    layer("report", range(5)),
    # ---- the torch line: nothing above it imports torch ----
    layer("stage", (0,)),
    layer("execution profiling", (0, 1, 2, 6)),
    layer("balance pipeline __init__", range(8)),
    layer("models data train doctor", range(9)),
    layer("cli __main__", range(11)),
]
FIRST_WITH_TORCH = 6

# Neighbours in one layer that know each other, each with its reason.
NEIGHBOURS = {
    ("pipeline", "balance"),  # GPipe(module, 4) balances by itself
    ("__init__", "balance"),  # the package gives out the public names of both
    ("__init__", "pipeline"),
    ("train", "data"),  # what a data factory returns is told from what it does not
}


class Import(NamedTuple):
    module: str
    line: int


def layer_of(unit: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if unit in layer.units)


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(source: str) -> Iterator[Import]:
    """Every import in the text, wherever it stands: in functions and under TYPE_CHECKING, too."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=0):
                yield from (Import(f"{module}.{alias.name}", node.lineno) for alias in names)
            case ast.ImportFrom():
                raise AssertionError(f"line {node.lineno}: a relative import")
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(function).endswith(("import_module", "__import__")):
                    yield Import(name, node.lineno)


def imported_unit(module: str) -> str | None:
    """The unit of ours that an import reaches; a name of the package itself is in __init__."""
    package, _, rest = module.partition(".")
    if package != "gpipe":
        return None
    unit = rest.partition(".")[0]
    return unit if any(unit in layer.units for layer in LAYERS) else "__init__"


def violations(unit: str, source: str) -> list[str]:
    """The imports that a module of `unit` may not have, each as a sentence."""
    return [
        f"line {found.line}: {unit} imports {found.module}"
        for found in imports(source)
        if not may_import(unit, found.module)
    ]


def may_import(unit: str, module: str) -> bool:
    if module.partition(".")[0] == "torch":
        return layer_of(unit) >= FIRST_WITH_TORCH
    imported = imported_unit(module)
    if imported is None or imported == unit or (unit, imported) in NEIGHBOURS:
        return True
    return layer_of(imported) in LAYERS[layer_of(unit)].may_import


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_imports_only_what_its_layer_may(path: Path) -> None:
    assert violations(unit_of(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("unit", "source"),
    [
        ("stage", "from gpipe.schedule import Action"),
        ("stage", "import gpipe.schedule.action"),
        ("stage", "from gpipe import schedule"),
        ("stage", "def hidden():\n    from gpipe.schedule import Action"),
        ("stage", "if TYPE_CHECKING:\n    from gpipe.schedule import Action"),
        ("stage", "import importlib\nimportlib.import_module('gpipe.schedule')"),
        ("stage", "__import__('gpipe.execution')"),
        ("stage", "from gpipe import GPipe"),
        ("errors", "from gpipe.schedule import Action"),
        ("schedule", "import torch"),
        ("schedule", "def hidden():\n    import torch.nn as nn"),
        ("timeline", "from torch import Tensor"),
        ("timeline", "from gpipe.partition import balance_costs"),
        ("execution", "from gpipe.pipeline import GPipe"),
        ("execution", "from gpipe.simulate import simulate"),
        ("balance", "from gpipe.pipeline import GPipe"),
        ("data", "from gpipe.train.config import load"),
        ("train", "from gpipe.cli import main"),
    ],
)
def test_a_forbidden_import_is_found(unit: str, source: str) -> None:
    assert len(violations(unit, source)) == 1


@pytest.mark.parametrize(
    ("unit", "source"),
    [
        ("schedule", "import numpy\nfrom gpipe.errors import ScheduleError"),
        ("schedule", "from gpipe.schedule.action import Action"),
        ("execution", "import torch\nfrom gpipe.schedule import Action\nimport gpipe.stage"),
        ("train", "from gpipe import GPipe\nfrom gpipe.timeline import Timeline"),
        ("cli", "from gpipe.train.loop import train"),
        ("errors", "import torchless"),
    ],
)
def test_an_allowed_import_is_let_pass(unit: str, source: str) -> None:
    assert violations(unit, source) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {path: module_name(path) for path in MODULES}
    known = set(names.values())
    graph = {
        name: set(reached(imports(path.read_text()), known)) - {name}
        for path, name in names.items()
        if path.name != "__init__.py"  # a folder gives out the names of its modules
    }

    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def reached(found: Iterable[Import], known: set[str]) -> Iterator[str]:
    for module, _ in found:
        yield from {module, module.rpartition(".")[0]} & known
