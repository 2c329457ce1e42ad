"""The errors that gpipe raises on purpose, in one tree."""

__all__ = ["ConfigError", "GpipeError", "PlanError", "ScheduleError", "StageError"]


class GpipeError(Exception):
    """Root of the tree: catches everything that gpipe itself raises, wrong arguments excepted.

    Wrong arguments are `TypeError` or `ValueError`; an exception of the user's own layer, loss or
    data reaches the caller as itself.
    """


class ConfigError(GpipeError):
    """A run file is wrong: each mistake with its key path, its value and what is allowed."""


class PlanError(GpipeError):
    """No plan fits: too few layers, or too little memory; with what is needed and available."""


class ScheduleError(GpipeError):
    """A schedule is incomplete, disordered or deadlocked; the message holds the marked grid."""


class StageError(GpipeError):
    """Another rank failed: its rank, stage, layer, micro-batch and message.

    Attributes:
        rank: The rank that failed first; None where it cannot be told.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
