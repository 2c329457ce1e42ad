"""The progress bar of a profile."""

from tqdm import tqdm

__all__ = ["Bar"]


class Bar(tqdm):  # type: ignore[type-arg] # only its stubs are generic
    """How many layers are done, on stderr; gone when all are.

    Args:
        num_layers: How many there are.
        is_shown: Whether there is anything to be seen.
    """

    monitor_interval = 0  # tqdm would start a thread that outlives the profile

    def __init__(self, num_layers: int, is_shown: bool) -> None:
        super().__init__(
            total=num_layers, desc="profile", unit=" layers", leave=False, disable=not is_shown
        )
