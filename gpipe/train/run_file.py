"""The YAML text of a run file, read and written."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gpipe.errors import ConfigError

__all__ = ["dump", "parse", "read"]

# YAML 1.1 takes `1e-3` for text because it has no point; everyone who writes it means a number.
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z")


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, which YAML forbids and PyYAML lets pass."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in first:
                line = first[key.value].line + 1
                problem = f"the key `{key.value}` stands here and in line {line}; remove one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first[key.value] = key.start_mark
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `_Loader` would read as numbers."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def read(path: Path) -> dict[str, object]:
    """Reads the keys of a run file, unchecked.

    Raises:
        ConfigError: The file is missing, unreadable, not YAML, or holds no keys.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path}. Give the path of a run file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give a YAML file in UTF-8.") from error
    content = parse(text, str(path))
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds {_kind(content)}, not keys. Start with `name:`, `model:`, `data:` …"
        )
    return content


def parse(text: str, source: str) -> object:
    """Reads YAML as run files are read: no key twice, `1e-3` is a number.

    Raises:
        ConfigError: `text` is not YAML; the message names `source` and the line.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {_problem(error)}.") from error
    except ValueError as error:  # a date that there is not, a number of too many digits
        raise ConfigError(
            f"{source} has a value that YAML reads as a date or a number, and cannot ({error}). "
            "Put it in quotes, or write another."
        ) from error


def dump(content: Mapping[str, object]) -> str:
    """The YAML that `parse` reads as `content`, keys in their order."""
    # Beyond ASCII it escapes: PyYAML does not read back every line break that it writes.
    text: str = yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False)
    return text


def _problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error)
    problem = getattr(error, "problem", None) or getattr(error, "context", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _kind(content: object) -> str:
    return "nothing" if content is None else f"a {type(content).__name__}"
