"""What an action takes besides its layers, on this machine."""

from statistics import median

import torch
from torch import nn

from gpipe.pipeline import GPipe
from gpipe.stage.device import HOST
from gpipe.timeline import Timeline

__all__ = ["measured_action_s"]

NUM_STAGES, NUM_MICROBATCHES = 2, 32
NUM_STEPS = 7  # after those in which it is learnt what layers do


def measured_action_s() -> float:
    """The seconds of an action of layers that do next to nothing, waiting included.

    A worker that waits for another one is woken up; that counts, too.
    """
    layers = [nn.Linear(1, 1) for _ in range(NUM_STAGES)]
    places = [HOST] * NUM_STAGES
    model = GPipe(nn.Sequential(*layers), [1] * NUM_STAGES, NUM_MICROBATCHES, devices=places)
    x = torch.ones(NUM_MICROBATCHES, 1, device=HOST)
    lengths_s = [_step_s(model, x) for _ in range(2 + NUM_STEPS)]
    # As many actions as a worker has, and those of the others that it waits for at both ends.
    return median(lengths_s[2:]) / (2 * (NUM_MICROBATCHES + NUM_STAGES - 1))


def _step_s(model: GPipe, x: torch.Tensor) -> float:
    timeline = model.step(x, x, nn.functional.mse_loss).timeline
    assert isinstance(timeline, Timeline), "in training mode every step has one"
    return timeline.makespan_s
