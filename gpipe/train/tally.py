"""What a run has done so far: rows, seconds, waiting."""

from dataclasses import dataclass

from gpipe.timeline import Timeline, ideal_bubble

__all__ = ["Tally"]


@dataclass
class Tally:
    """Sums over steps.

    Attributes:
        num_rows: Rows that were trained on.
        elapsed_s: Seconds that these steps took, loading of the rows included.
    """

    num_rows: int = 0
    elapsed_s: float = 0.0
    _makespan_s: float = 0.0
    _waited_s: float = 0.0
    _ideally_waited_s: float = 0.0

    def add(
        self,
        num_rows: int,
        elapsed_s: float,
        timeline: Timeline,
        chunks: int,
        stages_per_worker: int = 1,
    ) -> None:
        """Adds one step; `chunks` is what was asked for, of a short mini-batch less is made."""
        self.num_rows += num_rows
        self.elapsed_s += elapsed_s
        self._makespan_s += timeline.makespan_s
        self._waited_s += timeline.bubble * timeline.makespan_s
        num_turns = stages_per_worker * min(chunks, num_rows)
        ideal = ideal_bubble(timeline.num_workers, num_turns)
        self._ideally_waited_s += ideal * timeline.makespan_s

    @property
    def rows_per_s(self) -> float:
        """Rows a second, over all steps."""
        return self.num_rows / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def bubble(self) -> float:
        """Share of the workers' time in which they waited, 0…1, as measured."""
        return self._waited_s / self._makespan_s if self._makespan_s else 0.0

    @property
    def ideal_bubble(self) -> float:
        """The same share for equal stages with a device each, by the formula (K-1)/(v M+K-1)."""
        return self._ideally_waited_s / self._makespan_s if self._makespan_s else 0.0
