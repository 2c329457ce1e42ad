"""One mistake in a run file, and how it reads."""

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpipe.errors import ConfigError

__all__ = ["Mistake", "Mistakes", "RunFileError", "did_you_mean", "nearest", "show"]

_MAX_SHOWN = 60


@dataclass(frozen=True)
class Mistake:
    """What is wrong at one place of a run file.

    Attributes:
        path: Dotted key path, e.g. `pipeline.chunks`.
        text: The value, what is allowed instead, the nearest known word.
    """

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


class RunFileError(ConfigError):
    """All mistakes of a run file that were found at once."""

    def __init__(self, mistakes: Sequence[Mistake], source: str = "the run file") -> None:
        noun = "mistake" if len(mistakes) == 1 else "mistakes"
        lines = "".join(f"\n  {mistake}" for mistake in mistakes)
        super().__init__(f"{len(mistakes)} {noun} in {source}:{lines}")
        self.mistakes = tuple(mistakes)


@dataclass
class Mistakes:
    """Collects mistakes, so that they are refused together and not one by one."""

    found: list[Mistake] = field(default_factory=list)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Keeps the mistakes of a `RunFileError` that is raised inside, and goes on after it."""
        try:
            yield
        except RunFileError as error:
            self.found += error.mistakes

    def refuse(self) -> None:
        """Raises what was found.

        Raises:
            RunFileError: There is at least one mistake.
        """
        if self.found:
            raise RunFileError(self.found)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, capitals aside; None if none is near."""
    spelled = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), spelled, n=1)
    return spelled[near[0]] if near else None


def did_you_mean(word: str | None) -> str:
    """The end of a message that proposes `word`; empty for None."""
    return "" if word is None else f" Did you mean `{word}`?"


def show(value: object) -> str:
    """The value as it may stand in a run file, shortened to one line."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
