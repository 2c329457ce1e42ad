"""Where the tests of real accelerators put their stages."""

import pytest
import torch

from gpipe.stage.device import default_devices

__all__ = ["needs_accelerator", "places", "precision"]

needs_accelerator = pytest.mark.skipif(
    not default_devices(), reason="needs an accelerator, and torch finds none here"
)


def places(num_stages: int) -> list[torch.device]:
    """A device for each stage; with fewer devices, several stages on one."""
    devices = default_devices()
    return [devices[stage % len(devices)] for stage in range(num_stages)]


def precision() -> torch.dtype:
    """Double, where the accelerator has it."""
    try:
        torch.zeros(1, dtype=torch.float64, device=default_devices()[0])
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64
