"""The class that users wrap their model in."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Self, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from gpipe.arguments import require_choice, require_count
from gpipe.balance import balance_by_parameters, require_balance
from gpipe.execution.engine import Engine
from gpipe.execution.inlet import inlet_of, near
from gpipe.execution.loss_head import LossHead
from gpipe.execution.orders import Orders
from gpipe.execution.recorder import Recorder
from gpipe.execution.skip_channel import Route
from gpipe.schedule import LOOPED_SCHEDULES, RECOMPUTE_MODES, Builder, Schedule
from gpipe.stage.alias import Aliases
from gpipe.stage.batchnorm import defer_batch_norm
from gpipe.stage.boundary import unpack
from gpipe.stage.device import default_devices
from gpipe.stage.loss import LossFunction, reduction_of
from gpipe.stage.microbatch import Batch, Split, join, num_rows, slice_sizes
from gpipe.stage.placement import require_devices, require_list
from gpipe.stage.sequential import require_sequential
from gpipe.stage.skip_route import skip_routes
from gpipe.stage.stage import Stage
from gpipe.timeline import Timeline

__all__ = ["GPipe", "StepResult", "num_workers_of"]


@dataclass(frozen=True)
class StepResult:
    """What `GPipe.step` gives back.

    Attributes:
        loss: The loss of the mini-batch: a tensor with one number, without a graph.
        output: The output of the mini-batch, without a graph; None unless it was asked for.
    """

    loss: Tensor
    output: Any
    _recorder: Recorder | None = field(default=None, repr=False)

    @property
    def timeline(self) -> Timeline | None:
        """When each action ran; None where no gradients were made."""
        return self._recorder.timeline if self._recorder else None


class GPipe(nn.Module):
    """A Sequential whose stages work on the micro-batches of a mini-batch in a pipeline.

    It is used like the Sequential that it wraps and gives the same gradients: as a module,
    `loss_fn(model(x), y).backward()`, or by `step`, which runs forward and backward together in the
    order of `schedule`. The layers stay the user's own objects and keep their names in
    `state_dict()`. In `eval()` mode no graph is made: the output cannot be differentiated.

    Args:
        module: The model; each child is a layer and is moved to the device of its stage.
        balance: Layers per stage, such as `[3, 3, 2]`; or the number of stages, to which the bytes
            of parameters and buffers are then evenly dealt; or None for one stage per device.
        chunks: How many micro-batches a mini-batch is cut into, where it has that many rows.
        checkpoint: Which micro-batches drop their activations and recompute them before their
            backward: "always"; "except_last", not where the backward comes next anyway; "never".
        schedule: The order of `step`: "fill_drain", "1f1b", "interleaved_1f1b",
            "looped_breadth_first", a `Schedule`, or a function
            (num_stages, num_microbatches) -> Schedule. `model(x)` is always fill-drain.
        devices: One per worker; a worker has one stage, or several under the last four: by name,
            stage s is on worker s mod K. None: the accelerators; without any, "cpu" for all.
        deferred_batch_norm: Whether the running statistics of BatchNorm layers are updated once a
            mini-batch, as by the un-split one, instead of once a micro-batch.
        split: Along which dimension tensors are cut into micro-batches; by default along 0. A
            number holds for all tensors of input, target and output. A structure such as
            `{"x": 0, "mask": None}` holds for the input, where None gives every micro-batch the
            whole; target and output are cut along 0 then.

    Raises:
        TypeError: `module` is no Sequential, or an argument has the wrong type.
        ValueError: An argument has a value that cannot be; the message says which can.
        PlanError: There are fewer layers than stages.
        ScheduleError: The schedule is for other sizes, incomplete, disordered or deadlocked.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: int | Sequence[int] | None = None,
        chunks: int = 1,
        *,
        checkpoint: str = "except_last",
        schedule: str | Schedule | Builder = "1f1b",
        devices: Sequence[torch.device | str] | None = None,
        deferred_batch_norm: bool = False,
        split: Split = None,
    ) -> None:
        super().__init__()
        require_sequential(module)
        require_list(devices)
        self.chunks = require_count("chunks", chunks)
        self.checkpoint = require_choice("checkpoint", checkpoint, RECOMPUTE_MODES)
        self.schedule = schedule
        self.deferred_batch_norm = deferred_batch_norm
        self.split = 0 if split is None else split
        self.balance = _balance(module, balance, devices)
        self._orders = self._make_orders(num_workers_of(schedule, devices))
        self.devices = require_devices(devices, self._orders.num_workers)
        # What hangs on the Sequential hangs on this module now: its layers keep their names.
        # (Last, since a layer may have the name of an attribute above.)
        of_torch = vars(nn.Module())
        vars(self).update({name: vars(module)[name] for name in of_torch})
        self._build()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages; each has its layers and its device."""
        return self._engine.stages

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._layers())

    def __getitem__(self, index: int | slice) -> nn.Module:
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self.named_children())[index]))
        return self._layers()[index]

    def forward(self, input: Any) -> Any:
        """The output of the whole mini-batch; any loss over it may follow.

        Args:
            input: What the Sequential takes; each tensor has one row per example.

        Returns:
            What the Sequential returns; each tensor has one row per example.

        Raises:
            ValueError: The tensors of the input disagree on the number of rows.
            BaseException: What a layer raised, with a note of stage, layer and micro-batch.
        """
        batch = Batch.of("input", input, self.split)
        rows = num_rows(batch)
        with self._engine_of_layers().turn():
            if not self._trains(rows):
                schedule = self._orders.of_model(self._num_microbatches(rows), "never")
                return unpack(join(self._engine.evaluate(batch, schedule), self._output_dim()))
            schedule = self._orders.of_model(self._num_microbatches(rows), self.checkpoint)
            output = self._engine.differentiable(
                batch, schedule, self._trained(), self._output_dim()
            )
            return unpack(output)

    def step(
        self,
        input: Any,
        target: Any,
        loss_fn: LossFunction,
        *,
        loss_reduction: str = "mean",
        return_output: bool = False,
        loss_scale: float = 1.0,
    ) -> StepResult:
        """Run forward and backward in the order of the schedule and add the gradients to `.grad`.

        In `eval()` mode, or without grad mode, there are no gradients.

        Args:
            input: What the Sequential takes; each tensor has one row per example.
            target: What `loss_fn` takes; each tensor has one row per example.
            loss_fn: Called with the output and the target of each micro-batch; gives one number.
            loss_reduction: "mean": `loss_fn` averages over its rows; "sum": it adds them up;
                "weighted": it gives (sum, weight) and the loss is the sum of sums by that of
                weights. The mean of torch's own cross-entropy and negative log-likelihood is
                taken as the weighted one that it is.
            return_output: Whether the result has the output, too.
            loss_scale: A factor of the gradients, not of the loss in the result.

        Raises:
            ValueError: Input and target disagree on the number of rows, or `loss_reduction` is
                unknown or contradicts `loss_fn`.
            RuntimeError: The loss does not depend on anything that requires grad.
            BaseException: What a layer or the loss raised, with a note of stage, layer and
                micro-batch; gradients are as they were before.
        """
        batch = Batch.of("input", input, self.split)
        targets = Batch.of("target", target, self._output_dim())
        rows = num_rows(batch, targets)
        reduction = reduction_of(loss_fn, loss_reduction)
        with self._engine_of_layers().turn():
            trains = self._trains(rows)
            num_microbatches = self._num_microbatches(rows)
            if trains:
                schedule = self._orders.of_step(num_microbatches, self.checkpoint)
            else:
                schedule = self._orders.of_model(num_microbatches, "never")
            targets = near(targets, self.stages[-1].runs_on)
            head = LossHead(
                reduction,
                targets.slices(num_microbatches),
                slice_sizes(rows, num_microbatches),
                inlet_of(targets, self.stages[-1].runs_on),
                loss_scale=loss_scale,
                output_dim=self._output_dim() if return_output else None,
            )
            recorder = None
            if trains:
                _warn_of_replicas()
                of_loss, names = _parameters_of_loss(loss_fn)
                names |= self._trained()
                recorder = self._engine.step(batch, schedule, head, names, of_loss)
            else:
                self._engine.evaluate(batch, schedule, head)
            return StepResult(head.total(), head.output(), recorder)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to()`, `half()` and the like do to all tensors; where these live does not change.

        Raises:
            ValueError: It would move a stage away from its device.
        """
        for device in dict.fromkeys(self.devices):
            if fn(torch.empty(0, device=device)).device != device:
                raise ValueError(
                    f"The stages of this GPipe live on {', '.join(map(str, self.devices))}, and "
                    "its parameters cannot be moved away from there. Choose `devices` when you "
                    "make it; its state_dict() can be loaded anywhere."
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        derived = ("_engine", "_orders")
        return {name: value for name, value in vars(self).items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._orders = self._make_orders(len(self.devices))
        self._build()

    def _build(self) -> None:
        """Make what follows from the arguments, and is neither copied nor pickled."""
        named_layers = iter(self.named_children())
        stages: list[Stage] = []
        settled: dict[Parameter, Parameter] = {}
        for num_layers, worker in zip(self.balance, self._orders.worker_of, strict=True):
            first_layer, device = sum(len(stage) for stage in stages), self.devices[worker]
            names, layers = zip(*islice(named_layers, num_layers), strict=True)
            stages.append(Stage(len(stages), names, layers, first_layer, device, settled))
        norms = defer_batch_norm(self._layers()) if self.deferred_batch_norm else []
        self._engine = Engine(stages, len(self.devices), self._routes(), norms)

    def _make_orders(self, num_workers: int | None) -> Orders:
        return Orders(self.schedule, len(self.balance), self.chunks, num_workers)

    def _engine_of_layers(self) -> Engine:
        """The engine; a new one if layers were exchanged since the last mini-batch."""
        if [layer for stage in self.stages for layer in stage] != self._layers():
            require_balance(self.balance, len(self))
            self._build()
        return self._engine

    def _routes(self) -> list[Route]:
        """The skips that go from one stage to another."""
        stage_of = [stage for stage, size in enumerate(self.balance) for _ in range(size)]
        routes = (
            Route(skip.key, stage_of[skip.stash_layer], stage_of[skip.pop_layer])
            for skip in skip_routes(self._layers())
        )
        return [route for route in routes if route.stash_stage != route.pop_stage]

    def _output_dim(self) -> int:
        return self.split if isinstance(self.split, int) else 0

    def _layers(self) -> list[nn.Module]:
        return list(self.children())

    def _trains(self, rows: int) -> bool:
        trains = self.training and torch.is_grad_enabled()
        if trains and rows == 0:
            raise ValueError(
                "The mini-batch has 0 rows: there is nothing to train on. Leave it out."
            )
        return trains

    def _trained(self) -> dict[Parameter, str]:
        """The parameters that get gradients, each once, with their names."""
        named = self.named_parameters()
        return {parameter: name for name, parameter in named if parameter.requires_grad}

    def _num_microbatches(self, rows: int) -> int:
        return max(1, min(self.chunks, rows))


def _parameters_of_loss(loss_fn: LossFunction) -> tuple[list[Aliases], dict[Parameter, str]]:
    """The aliases and names of what a loss with parameters of its own trains."""
    if not isinstance(loss_fn, nn.Module):
        return [], {}
    named = ((f"loss_fn.{name}", p) for name, p in loss_fn.named_parameters() if p.requires_grad)
    names = {parameter: name for name, parameter in named}
    return [Aliases(loss_fn)] if names else [], names


def _warn_of_replicas() -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            f"step() runs in a group of {dist.get_world_size()} processes, and nothing averages "
            "its gradients over them. Wrap the GPipe in DistributedDataParallel and call "
            "loss.backward(), or average the gradients yourself.",
            stacklevel=3,
        )


def num_workers_of(
    schedule: str | Schedule | Builder, devices: Sequence[torch.device | str] | None
) -> int | None:
    """How many workers share the stages, where that is not for the schedule to say."""
    if not isinstance(schedule, str) or schedule not in LOOPED_SCHEDULES:
        return None
    return len(default_devices() if devices is None else devices) or None


def _balance(
    module: nn.Sequential,
    balance: int | Sequence[int] | None,
    devices: Sequence[torch.device | str] | None,
) -> list[int]:
    if balance is None:
        balance = max(1, len(default_devices() if devices is None else devices))
    if isinstance(balance, SupportsIndex):
        return balance_by_parameters(require_count("balance", balance), module)
    return require_balance(balance, len(module))
