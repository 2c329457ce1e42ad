"""How fast copies between devices are."""

from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from gpipe.stage.device import HOST, Device

__all__ = ["link_bytes_per_s"]

COPIED_BYTES = 64 * 1024**2
NUM_COPIES = 5


def link_bytes_per_s(source: Device, target: Device) -> float:
    """How many bytes a second a copy carries, the median of some; from and to pinned memory."""
    pinned = HOST in (source.torch_device, target.torch_device) and source is not target
    here = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=source.torch_device)
    there = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=target.torch_device)
    if pinned:
        here, there = (each.pin_memory() if each.device == HOST else each for each in (here, there))
    spans_s = [_copy_s(here, there, source, target) for _ in range(NUM_COPIES + 1)]
    return COPIED_BYTES / median(spans_s[1:])  # the first one also sets the way up


def _copy_s(here: Tensor, there: Tensor, source: Device, target: Device) -> float:
    start_s = perf_counter()
    there.copy_(here, non_blocking=True)
    source.synchronize()
    target.synchronize()
    return perf_counter() - start_s
