"""What the rows of a micro-batch say about each channel, and how it adds up."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe.stage.device import from_host

__all__ = ["Moments", "merged", "moments_of", "require_variance"]


class Moments(NamedTuple):
    """What the rows of a micro-batch, or of several, say about each channel."""

    shape: torch.Size
    """Of the input that they are of."""
    num_values: int
    """How many each channel has."""
    mean: Tensor
    deviations: Tensor
    """The sum of the squared deviations from the mean."""

    def to(self, device: torch.device) -> "Moments":
        """The same on a device."""
        mean, deviations = self.mean.to(device), self.deviations.to(device)
        return self._replace(mean=mean, deviations=deviations)


def moments_of(input: Tensor, mean: Tensor, variance: Tensor) -> Moments:
    """The moments of an input from its mean and unbiased variance, as torch computed them."""
    num_values = math.prod((input.shape[0], *input.shape[2:]))
    if num_values > 0 and torch.finfo(mean.dtype).bits < 32:
        # Buffers in half precision cannot hold them, so they are computed once more.
        dims = [dim for dim in range(input.dim()) if dim != 1]
        variance, mean = torch.var_mean(input.float(), dims, correction=0)
        return Moments(input.shape, num_values, mean, variance * num_values)
    # Of one value the unbiased variance is 0 / 0, and there is no deviation.
    deviations = variance * (num_values - 1) if num_values > 1 else torch.zeros_like(variance)
    return Moments(input.shape, num_values, mean, deviations)


def merged(parts: Sequence[Moments]) -> Moments:
    """The moments of all parts together; empty parts say nothing.

    The formula of Chan, Golub and LeVeque for many parts at once. Means are taken relative to the
    first: they differ by far less than their size, and rounding then is as small as the difference.
    """
    parts = [part for part in parts if part.num_values > 0] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    means = torch.stack([part.mean for part in parts])
    weights = from_host([part.num_values for part in parts], means).unsqueeze(1)
    total = sum(part.num_values for part in parts)
    shifts = means - means[0]
    shift = (weights * shifts).sum(0) / total
    between = (weights * (shifts - shift).square()).sum(0)
    within = torch.stack([part.deviations for part in parts]).sum(0)
    return Moments(parts[0].shape, total, means[0] + shift, within + between)


def require_variance(parts: Sequence[Moments]) -> None:
    """Refuse one value per channel in all parts together, as torch does."""
    shapes = [part.shape for part in parts if part.num_values > 0]
    if sum(part.num_values for part in parts) == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {shapes[0]}"
        )
