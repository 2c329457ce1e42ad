"""The loss of a step: what takes the output, and what it trains besides the model."""

import warnings

import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from gpipe.execution.facts import Size
from gpipe.execution.inlet import inlet_of, near
from gpipe.execution.loss_head import LossHead
from gpipe.stage.alias import Aliases
from gpipe.stage.device import Device
from gpipe.stage.loss import LossFunction, Reduction
from gpipe.stage.microbatch import Batch, slice_sizes

__all__ = ["head_of", "parameters_of_loss", "warn_of_replicas"]


def head_of(
    reduction: Reduction,
    targets: Batch,
    size: Size,
    device: Device,
    loss_scale: float,
    output_dim: int | None,
) -> LossHead:
    """What takes the output of the last stage, on this device."""
    targets = near(targets, device)
    return LossHead(
        reduction,
        targets.slices(size.num_microbatches),
        slice_sizes(size.rows, size.num_microbatches),
        inlet_of(targets, device),
        loss_scale=loss_scale,
        output_dim=output_dim,
        total_rows=size.total_rows,
    )


def parameters_of_loss(loss_fn: LossFunction) -> tuple[list[Aliases], dict[Parameter, str]]:
    """The aliases and names of what a loss with parameters of its own trains."""
    if not isinstance(loss_fn, nn.Module):
        return [], {}
    named = ((f"loss_fn.{name}", p) for name, p in loss_fn.named_parameters() if p.requires_grad)
    names = {parameter: name for name, parameter in named}
    return [Aliases(loss_fn)] if names else [], names


def warn_of_replicas() -> None:
    """Warn the caller of `step` where replicas would go their own ways."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            f"step() runs in a group of {dist.get_world_size()} processes, and nothing averages "
            "its gradients over them. Wrap the GPipe in DistributedDataParallel and call "
            "loss.backward(), or average the gradients yourself.",
            stacklevel=4,
        )
