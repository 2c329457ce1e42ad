"""What stands for a layer that another process has."""

from typing import Any

from torch import nn

__all__ = ["Elsewhere"]


class Elsewhere(nn.Module):
    """Takes the place of a layer, and has none of its tensors.

    Args:
        kind: The name of the layer's class.
        worker: The worker that has it.
    """

    def __init__(self, kind: str, worker: int) -> None:
        super().__init__()
        self.kind = kind
        self.worker = worker

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"{self.kind} on worker {self.worker}"

    def forward(self, *_: Any) -> Any:
        """There is nothing to call."""
        raise RuntimeError(
            f"This {self.kind} is on worker {self.worker} of the pipe, in another process. Call "
            "the whole model there and here, or look at the layer there."
        )

    def _load_from_state_dict(self, *_: Any) -> None:
        """Let entries of the layer be: its own process loads them."""
