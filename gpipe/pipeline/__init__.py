"""The class that users wrap their model in."""

from gpipe.pipeline.layout import num_workers_of
from gpipe.pipeline.model import GPipe
from gpipe.pipeline.result import StepResult

__all__ = ["GPipe", "StepResult", "num_workers_of"]
