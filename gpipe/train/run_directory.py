"""The folder that keeps what a run was and did."""

import itertools
from pathlib import Path

from gpipe.errors import ConfigError
from gpipe.train.config import RunConfig
from gpipe.train.run_file import dump

__all__ = ["create_run_directory"]


def create_run_directory(config: RunConfig) -> Path:
    """Makes `output_dir/name`, or `name-2`, `name-3`, … where that exists.

    `config.yaml` in it is the resolved configuration; it is a run file itself.

    Raises:
        ConfigError: `output_dir` cannot be written.
    """
    try:
        directory = _create(Path(config.output_dir), config.name)
        content = dump(config.model_dump())
        (directory / "config.yaml").write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"output_dir: no run directory can be made: {error}. Choose a folder you can write."
        ) from error
    return directory


def _create(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        directory = parent / (name if number == 1 else f"{name}-{number}")
        try:
            # mkdir fails where the folder exists, so two runs never get the same one.
            directory.mkdir()
        except FileExistsError:
            continue
        return directory
    raise AssertionError("unreachable: counting never ends")
