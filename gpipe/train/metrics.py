"""The file `metrics.jsonl` of a run: one record a line."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["MetricsFile"]

Number = int | float | None


class MetricsFile:
    """Writes records as JSON objects, one a line, each on disk as soon as it is written.

    A number that is not finite is written as null: JSON has no other word for it.

    Every record has `kind`, `step` and `epoch`, all counted from 1. The others:

    * kind "step": `loss` over the mini-batch, `rows`, `rows_per_s`, `lr`, `bubble` (the share
      of the workers' time in which they waited), `makespan_s`.
    * kind "evaluation": `test_loss`, and `test_accuracy` (0…1) where the targets are classes.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("x", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, kind: str, step: int, epoch: int, **numbers: Number) -> None:
        """Adds one record; a number that is None is left out.

        Args:
            kind: "step" or "evaluation".
            step: Number of the optimizer step, from 1.
            epoch: Number of the epoch, from 1.
            numbers: What was measured, with the unit in the name.
        """
        record = {"kind": kind, "step": step, "epoch": epoch} | _finite(numbers)
        # One write of a whole line: whoever reads meanwhile sees whole records.
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; nothing can be written afterwards."""
        self._file.close()


def _finite(numbers: Mapping[str, Number]) -> dict[str, Number]:
    return {
        name: number if math.isfinite(number) else None
        for name, number in numbers.items()
        if number is not None
    }
