"""The devices that a run is planned for."""

from math import inf

import torch

from gpipe.plan import DeviceSpec
from gpipe.profiling import link_bytes_per_s
from gpipe.stage.device import HOST, default_devices, device_of
from gpipe.train.config import RunConfig
from gpipe.train.mistake import Mistake, RunFileError

__all__ = ["device_spec_of", "devices_here", "measuring_device"]


def device_spec_of(config: RunConfig) -> DeviceSpec:
    """As the file describes it, else as those here are; the memory of the CPU is nobody's limit."""
    here = [device_of(device) for device in devices_here(config)]
    memory_bytes, bandwidth = config.plan.memory, config.plan.bandwidth
    if memory_bytes is None and here and (memory := here[0].memory()):
        memory_bytes = memory.total_bytes
    if bandwidth is None and len(here) > 1:
        bandwidth = link_bytes_per_s(here[0], here[1])
    return DeviceSpec(
        memory_bytes=inf if memory_bytes is None else memory_bytes,
        bandwidth_bytes_per_s=bandwidth or 0.0,
        latency_s=config.plan.latency_s,
    )


def devices_here(config: RunConfig) -> list[torch.device]:
    """The accelerators of this machine that the file names, each once; without a list, all.

    A plan may name devices of another machine.

    Raises:
        RunFileError: A name is none of a device.
    """
    here, listed = default_devices(), config.pipeline.devices
    if listed is None:
        return here
    named = [_named(name) for name in listed]
    return [device for device in here if device in named]


def measuring_device(config: RunConfig) -> torch.device | None:
    """Where layers are measured; None for where they are by default."""
    listed = config.pipeline.devices
    if listed is None:
        return None
    here = devices_here(config)
    is_host = all(_named(name) == HOST for name in listed)
    return HOST if is_host else here[0] if here else None


def _named(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        text = f'"{name}" names no device. Write it as torch does, such as "cuda:0" or "cpu".'
        raise RunFileError([Mistake("pipeline.devices", text)]) from error
    if device.type == HOST.type:
        return HOST
    return torch.device(device.type, device.index or 0)
