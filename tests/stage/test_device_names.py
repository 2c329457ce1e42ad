"""Only one module knows what kinds of device there are."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "gpipe"
MODULES = sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "stage" / "device.py"})
TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "privateuseone")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_else_names_a_type_of_device(path):
    assert list(names_of_devices(path.read_text())) == []


@pytest.mark.parametrize(
    "source", ["x.to('cpu')", "d = f'cuda:{i}'", "torch.cuda.Stream()", "x.cpu()"]
)
def test_a_name_is_found(source):
    assert list(names_of_devices(source))


@pytest.mark.parametrize(
    "source", ["'The cpu, for example.'", "def f():\n    '''Moves to cuda:0.'''"]
)
def test_a_sentence_is_none(source):
    assert not list(names_of_devices(source))


def names_of_devices(source: str) -> Iterator[str]:
    """Attributes and strings without a blank in them, which are no sentences, that name a type."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if " " not in text and text.startswith(TYPES):
                yield f"line {node.lineno}: {text!r}"
            case ast.Attribute(attr=name) if name in TYPES:
                yield f"line {node.lineno}: .{name}"
