"""The optimizer that a run file names."""

import inspect
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from gpipe.stage.device import HOST
from gpipe.train.config import MOST, OptimizerConfig
from gpipe.train.mistake import Mistake, RunFileError, did_you_mean, nearest, show
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
    _require_finite(config)
    return found


def build_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Makes the optimizer over `parameters`.

    Raises:
        RunFileError: There is no such optimizer, it refuses an argument, or it cannot take a step
            where a parameter lives.
    """
    parameters = list(parameters)
    optimizer = _made(config, parameters)
    for device in {parameter.device for parameter in parameters}:
        _share_on(config, device)
    return optimizer


def state_share(config: OptimizerConfig) -> float:
    """How many bytes the optimizer keeps for each of a gradient, seen on a small one.

    Raises:
        RunFileError: It fails to take a step.
    """
    # Where it counts its steps changes nothing, and only accelerators let it count there.
    arguments = {"capturable": False} if config.arguments.get("capturable") else {}
    return _share_on(config.model_copy(update=arguments), HOST)


def _made(config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> Optimizer:
    found: Callable[..., Optimizer] = resolve_optimizer(config)
    try:
        return found(parameters, **config.arguments)
    except Exception as error:  # torch checks few arguments, and stumbles over the others
        text = (
            f"{config.name} refuses its arguments: {error}. They are {show(config.arguments)}; "
            f"give what torch.optim.{config.name} takes."
        )
        raise RunFileError([Mistake("optimizer", text)]) from error


def _share_on(config: OptimizerConfig, device: torch.device) -> float:
    """What it keeps after a step on a small parameter there."""
    dense = torch.zeros(32, 32, device=device)
    reasons = []
    for gradient in (dense, dense.to_sparse()):  # some take none but sparse gradients
        try:
            return _share_after_step(config, gradient)
        except RunFileError:
            raise
        except Exception as error:  # noqa: BLE001 - torch's own: it is told below
            reasons.append(f"{type(error).__name__}: {error}")
    text = (
        f"{config.name} fails in its first step with {show(config.arguments)} ({reasons[0]}). Give "
        "other arguments, or name another optimizer."
    )
    raise RunFileError([Mistake("optimizer", text)])


def _share_after_step(config: OptimizerConfig, gradient: torch.Tensor) -> float:
    parameter = nn.Parameter(torch.zeros(32, 32, device=gradient.device))
    parameter.grad = gradient
    optimizer = _made(config, [parameter])
    optimizer.step()
    state = optimizer.state[parameter].values()
    # A count of steps is as small for a large parameter.
    large = (each for each in state if isinstance(each, torch.Tensor) and each.dim() > 0)
    return sum(each.nbytes for each in large) / parameter.nbytes


def _require_finite(config: OptimizerConfig) -> None:
    """Refuse numbers with which no step can compute."""
    mistakes = []
    for name, value in config.arguments.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not abs(number) <= MOST:
                text = f"{show(value)} is not allowed. Give a number of at most {MOST:g}."
                mistakes.append(Mistake(f"optimizer.{name}", text))
                break
    if mistakes:
        raise RunFileError(mistakes)


def _known() -> dict[str, type[Optimizer]]:
    return {
        name: found
        for name, found in vars(torch.optim).items()
        if inspect.isclass(found)
        and issubclass(found, Optimizer)
        and found is not Optimizer
        and name not in _NEED_CLOSURE
    }
