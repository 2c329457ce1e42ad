"""The optimizer that a run file names."""

import inspect
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from gpipe.train.config import OptimizerConfig
from gpipe.train.mistake import Mistake, RunFileError, did_you_mean, nearest
from gpipe.train.signature import check_arguments

__all__ = ["build_optimizer", "resolve_optimizer", "state_share"]

# They ask for the loss again inside one step; a pipeline has run its mini-batch by then.
_NEED_CLOSURE = frozenset({"LBFGS"})


def resolve_optimizer(config: OptimizerConfig) -> type[Optimizer]:
    """Finds the class and checks the arguments, without making it.

    Raises:
        RunFileError: torch has no such class, or the arguments do not fit it.
    """
    known = _known()
    if config.name not in known:
        near = did_you_mean(nearest(config.name, known))
        text = f'"{config.name}" is no optimizer for this loop.{near} Known: {", ".join(known)}.'
        raise RunFileError([Mistake("optimizer.name", text)])
    found = known[config.name]
    check_arguments("optimizer", found, config.arguments, provided={"params"}, keys={"name"})
    return found


def build_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Makes the optimizer over `parameters`.

    Raises:
        RunFileError: There is no such optimizer, or it refuses an argument.
    """
    found: Callable[..., Optimizer] = resolve_optimizer(config)
    try:
        return found(parameters, **config.arguments)
    except (TypeError, ValueError) as error:
        text = f"{config.name} refuses its arguments: {error}"
        raise RunFileError([Mistake("optimizer", text)]) from error


def state_share(config: OptimizerConfig) -> float:
    """How many bytes the optimizer keeps for each of a gradient, seen on a small one."""
    parameter = nn.Parameter(torch.zeros(32, 32))
    parameter.grad = torch.zeros(32, 32)
    optimizer = build_optimizer(config, [parameter])
    optimizer.step()
    state = optimizer.state[parameter].values()
    # A count of steps is as small for a large parameter.
    large = (each for each in state if isinstance(each, torch.Tensor) and each.dim() > 0)
    return sum(each.nbytes for each in large) / parameter.nbytes


def _known() -> dict[str, type[Optimizer]]:
    return {
        name: found
        for name, found in vars(torch.optim).items()
        if inspect.isclass(found)
        and issubclass(found, Optimizer)
        and found is not Optimizer
        and name not in _NEED_CLOSURE
    }
