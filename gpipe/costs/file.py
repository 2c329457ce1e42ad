"""Files of costs: JSON that says what it is."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

from gpipe.errors import ConfigError

__all__ = ["read_costs", "refused", "write_costs"]

FORMAT = "gpipe layer costs"
VERSION = 1
REMEDY = "Pass a file that LayerCosts.save has written, or profile the model again."


def write_costs(path: str | PathLike[str], fields: dict[str, Any]) -> None:
    """Writes the fields, each in a line, beside the format and its version."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(fields[name])}" for name in fields)
    mark = f'"format": {json.dumps(FORMAT)}, "version": {VERSION}'
    Path(path).write_text(f'{{{mark}, "costs": {{\n{lines}\n}}}}\n', encoding="utf-8")


def read_costs(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads the fields that `write_costs` has written.

    Raises:
        ConfigError: The file is damaged, of something else, or of another version.
        OSError: It cannot be read.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:  # bytes that are no text, too
        raise refused(path, f"is no JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise refused(path, f"is no file of layer costs: its format is {found!r}, not {FORMAT!r}")
    if content.get("version") != VERSION:
        version = content.get("version")
        raise refused(path, f"has version {version!r}, and this gpipe reads {VERSION}")
    fields = content.get("costs")
    if not isinstance(fields, dict):
        raise refused(path, f"holds {type(fields).__name__} where its costs should be")
    return fields


def refused(path: str | PathLike[str], fact: str) -> ConfigError:
    """The error for a file of which `fact` is true."""
    return ConfigError(f"{path} {fact}. {REMEDY}")
