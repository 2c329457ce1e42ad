"""Overrides from the command line: `key.path=value`."""

import copy
from collections.abc import Mapping, Sequence

from gpipe.errors import ConfigError
from gpipe.train.mistake import Mistake, Mistakes, RunFileError, show
from gpipe.train.run_file import parse

__all__ = ["override"]


def override(content: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Sets each key path to its value, which is read as YAML; the last one of a path wins.

    Paths are not looked up here: one that is unknown is refused with all other unknown keys.

    Raises:
        RunFileError: An override is not `key.path=value`, or its value is not YAML.
    """
    changed: dict[str, object] = copy.deepcopy(dict(content))
    mistakes = Mistakes()
    for text in overrides:
        with mistakes.noted():
            _set(changed, *_split(text))
    mistakes.refuse()
    return changed


def _split(text: str) -> tuple[str, object]:
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        raise _wrong("write it as key.path=value, e.g. train.epochs=3", text)
    try:
        return path, parse(value, "the value")
    except ConfigError as error:
        raise _wrong(str(error), text) from error


def _set(content: dict[str, object], path: str, value: object) -> None:
    *sections, key = path.split(".")
    for depth, name in enumerate(sections):
        if content.get(name) is None:
            content[name] = {}
        inner = content[name]
        if not isinstance(inner, dict):
            owner = ".".join(sections[: depth + 1])
            raise _wrong(f"`{owner}` is {show(inner)}, which has no keys", f"{path}={value}")
        content = inner
    content[key] = value


def _wrong(reason: str, text: str) -> RunFileError:
    return RunFileError([Mistake(f"--set {text}", reason)])
