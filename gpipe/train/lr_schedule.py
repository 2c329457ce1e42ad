"""The course of the learning rate over a run."""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpipe.train.config import LrScheduleConfig

__all__ = ["build_lr_schedule", "lr_factor"]

# From the share of the way after the warm-up, 0…1, to the share of the learning rate.
_COURSES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def build_lr_schedule(config: LrScheduleConfig, optimizer: Optimizer, num_steps: int) -> LambdaLR:
    """A scheduler whose `step` is called after every optimizer step, `num_steps` times."""
    return LambdaLR(optimizer, lambda step: lr_factor(config, step, num_steps))


def lr_factor(config: LrScheduleConfig, step: int, num_steps: int) -> float:
    """What the optimizer's learning rate is multiplied with in step 0, 1, … of `num_steps`.

    The warm-up rises in equal parts and reaches 1 in its last step; cosine and linear reach 0
    where the run ends.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    num_left = max(1, num_steps - config.warmup_steps)
    return _COURSES[config.name](min(1.0, (step - config.warmup_steps) / num_left))
