"""Whether those that have copies of the same parameters have the same values."""

from collections.abc import Sequence
from typing import Any

from torch import distributed as dist
from torch import nn

from gpipe.errors import ConfigError
from gpipe.execution.pipe import Pipe
from gpipe.execution.relay import Tie
from gpipe.stage.fingerprint import Fingerprint, fingerprint

__all__ = ["require_same_start"]

_NUM_LOOKED_AT = 4096  # numbers of each parameter: enough to tell one seed from another


def require_same_start(layers: Sequence[nn.Module], ties: Sequence[Tie], pipe: Pipe) -> None:
    """Compare with replicas, and with workers that share a parameter; all ranks call it.

    Args:
        layers: Those of this worker, with their first values.
        ties: The parameters that several workers have.
        pipe: The processes.

    Raises:
        ConfigError: Copies differ, and would stay different for ever.
    """
    if pipe.replicas_control is not None:
        mine = [_print(parameter) for layer in layers for parameter in layer.parameters()]
        for replica, other in enumerate(_every(mine, pipe.replicas_control)):
            if other != mine:
                raise _differ(f"replica {replica} has other parameters than replica {pipe.replica}")
    if not ties:
        return
    here = {tie.number: _print(tie.parameter) for tie in ties if tie.parameter is not None}
    every = _every(here, pipe.control)
    for tie in ties:
        if len({each[tie.number] for each in every if tie.number in each}) > 1:
            raise _differ(f"layers {tie.layers} share a parameter, which differs between workers")


def _print(parameter: nn.Parameter) -> tuple[tuple[int, ...], Fingerprint]:
    return tuple(parameter.shape), fingerprint(parameter.detach().reshape(-1)[:_NUM_LOOKED_AT])


def _every(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, mine, group)
    return every


def _differ(fact: str) -> ConfigError:
    return ConfigError(
        f"On rank {dist.get_rank()}: {fact}. Call torch.manual_seed with one seed on all ranks "
        "before the layers are made, load one state_dict, or make them on the meta device."
    )
