"""The model that users wrap theirs in."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from gpipe.arguments import require_choice, require_count
from gpipe.balance import require_balance
from gpipe.execution.distributed import DistributedEngine
from gpipe.execution.engine import Engine
from gpipe.execution.facts import Ended, Size
from gpipe.execution.loss_head import LossHead
from gpipe.execution.replicas import BUCKET_BYTES, AllReduce
from gpipe.execution.total_norm import norm_here
from gpipe.pipeline.layers import Layers
from gpipe.pipeline.layout import Layout, OnMesh, Parallelize
from gpipe.pipeline.loss import head_of, parameters_of_loss, warn_of_replicas
from gpipe.pipeline.result import StepResult
from gpipe.schedule import RECOMPUTE_MODES, Builder, Schedule
from gpipe.stage.batchnorm import defer_batch_norm
from gpipe.stage.boundary import Boundary, unpack
from gpipe.stage.elsewhere import Elsewhere
from gpipe.stage.loss import LossFunction, reduction_of
from gpipe.stage.microbatch import Batch, Split, join, num_rows
from gpipe.stage.placement import require_list
from gpipe.stage.sequential import require_sequential
from gpipe.stage.stage import Stage
from gpipe.timeline import Timeline

__all__ = ["GPipe"]


class GPipe(Layers):
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
            mini-batch, as by the un-split one, instead of once a micro-batch. On a mesh each
            replica has its own; "replicas" lets them take in the rows of all.
        split: Along which dimension tensors are cut into micro-batches; by default along 0. A
            number holds for all tensors of input, target and output. A structure such as
            `{"x": 0, "mask": None}` holds for the input, where None gives every micro-batch the
            whole; target and output are cut along 0 then.
        mesh: A DeviceMesh with a dimension "pipe": this process has the stages of one worker, and
            others, which make the same GPipe, have those of the others. Along a dimension "data"
            are replicas, whose gradients are averaged.
        dynamic_shapes: Whether what passes between two stages of a mesh may look otherwise though
            the input looks the same, or a gradient be missing at times; shapes then go along.
        all_reduce: How gradients are summed over the replicas of a mesh, while their pipelines
            drain: "backend": by the collective of its backend; "ring": by `ring_all_reduce`;
            "none": not at all. They are weighed by the rows, or the weight, of all replicas, so
            that their sum is what one process would have.
        bucket_bytes: The most that goes into one such sum.
        parallelize: Called with each stage of this process, a Sequential of its layers, and the
            mesh; spreads the layers over further dimensions, such as by `fully_shard` of FSDP2
            (with each layer, not the stage) or `parallelize_module`, and returns the stage.
        patience_s: For how many seconds a rank may give no sign of life, as while one call holds
            Python's lock; then it is taken for dead, and all others end.
        watchdog_s: After how many seconds in which no rank of a mesh gets on stderr tells what each
            of them waits for; None: never.
        seed: What the first values of layers on the meta device are made of, the same on all
            ranks. They do not depend on where the model is cut.

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
        deferred_batch_norm: bool | Literal["replicas"] = False,
        split: Split = None,
        mesh: DeviceMesh | None = None,
        dynamic_shapes: bool = False,
        all_reduce: AllReduce = "backend",
        bucket_bytes: int = BUCKET_BYTES,
        parallelize: Parallelize | None = None,
        patience_s: float = 8.0,
        watchdog_s: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require_sequential(module)
        require_list(devices)
        self.chunks = require_count("chunks", chunks)
        self.checkpoint = require_choice("checkpoint", checkpoint, RECOMPUTE_MODES)
        self.schedule = schedule
        if not isinstance(deferred_batch_norm, bool):
            require_choice("deferred_batch_norm", deferred_batch_norm, ["replicas"])
        self.deferred_batch_norm = deferred_batch_norm
        self.split = 0 if split is None else split
        layers = list(module.children())
        shares = deferred_batch_norm == "replicas"
        liveness = patience_s, watchdog_s
        options = dynamic_shapes, all_reduce, bucket_bytes, parallelize, *liveness, shares
        on_mesh = OnMesh.of(mesh, *options)
        self._layout = Layout(layers, balance, self.chunks, schedule, devices, on_mesh)
        self.balance, self.devices = self._layout.balance, self._layout.devices
        self._layout.materialise(layers, seed)
        # What hangs on the Sequential hangs on this module now: its layers keep their names.
        # (Last, since a layer may have the name of an attribute above.)
        of_torch = vars(nn.Module())
        vars(self).update({name: vars(module)[name] for name in of_torch})
        if self._layout.pipe is not None:
            self._modules = self._layout.kept(dict(self.named_children()))
        self._build()
        self._layout.require_agreement(
            {"checkpoint": checkpoint, "split": str(split), "seed": seed}
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages; each has its layers and its device."""
        return self._engine.stages

    def total_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients together; on a mesh all ranks ask for it.

        Args:
            norm_type: The p of the p-norm.
        """
        if isinstance(self._engine, DistributedEngine):
            return self._engine.total_norm(norm_type)
        return norm_here((each.grad for each in self.parameters()), norm_type)

    @property
    def num_workers(self) -> int:
        """How many workers share the stages, in all processes."""
        return self._layout.orders.num_workers

    @property
    def has_last_stage(self) -> bool:
        """Whether the last stage is in this process, where the output and the loss are."""
        return self.stages[-1].index == len(self.balance) - 1

    def forward(self, input: Any, *, broadcast_output: bool = False) -> Any:
        """The output of the whole mini-batch; any loss over it may follow.

        On a mesh it only evaluates, and all ranks call it: the first worker's input is taken, and
        the output is on the last worker, None on the others.

        Args:
            input: What the Sequential takes; each tensor has one row per example.
            broadcast_output: Whether all workers of a mesh get the output.

        Returns:
            What the Sequential returns; each tensor has one row per example.

        Raises:
            ValueError: The tensors of the input disagree on the number of rows.
            RuntimeError: It is in training mode, with gradients, on a mesh.
            BaseException: What a layer raised, with a note of stage, layer and micro-batch.
        """
        self._require_backward_here()
        with self._engine_of_layers().turn():
            batch = self._input_batch(input)
            size = self._size(batch, None)
            if size.trains and batch is not None:
                schedule = self._layout.orders.of_model(size.num_microbatches, self.checkpoint)
                names, output_dim = self._trained(), self._output_dim()
                return unpack(self._engine.differentiable(batch, schedule, names, output_dim))
            schedule = self._layout.orders.of_model(size.num_microbatches, "never")
            outputs = self._engine.evaluate(batch, schedule).outputs
            whole = join(outputs, self._output_dim()) if outputs else None
            return self._given_out(whole, broadcast_output)

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
        reduction = reduction_of(loss_fn, loss_reduction)
        with self._engine_of_layers().turn():
            batch, targets = self._input_batch(input), self._target_batch(target)
            size = self._size(batch, targets)
            output_dim = self._output_dim() if return_output else None
            head = None
            if targets is not None:
                device = self.stages[-1].runs_on
                head = head_of(reduction, targets, size, device, loss_scale, output_dim)
            if size.trains:
                ended = self._train(batch, size, head, loss_fn)
            else:
                schedule = self._layout.orders.of_model(size.num_microbatches, "never")
                ended = self._engine.evaluate(batch, schedule, head)
            assert ended.loss is not None
            recorder = ended.recorder if size.trains else None
            return StepResult(ended.loss, head and head.output(), recorder)

    def close(self) -> None:
        """Give back the process groups of a mesh, on all ranks; nothing works afterwards."""
        if isinstance(self._engine, DistributedEngine):
            self._engine.close()

    def gather_timeline(self, result: StepResult) -> Timeline | None:
        """The timeline of a step with the actions of all workers.

        On a mesh all ranks call it. Clocks of several hosts are compared by the time of day.

        Args:
            result: What the step has given back.

        Returns:
            The same as `result.timeline` where all workers are in this process.
        """
        recorder = result.recorder
        if recorder is None or not isinstance(self._engine, DistributedEngine):
            return result.timeline
        return self._engine.gather_timeline(recorder)

    def __getstate__(self) -> dict[str, Any]:
        if self._layout.pipe is not None:
            raise TypeError(
                "A GPipe on a mesh cannot be copied or pickled: it is this process's part of "
                "something. Save its state_dict(), and make another GPipe there."
            )
        return {name: value for name, value in vars(self).items() if name != "_engine"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._layout.update(self._layers())
        self._build()

    def _build(self) -> None:
        """Make what follows from the arguments, and is neither copied nor pickled."""
        stages = self._layout.stages(dict(self.named_children()))
        for stage in stages:  # what spreads a layer over a mesh may have put another in its place
            self._modules.update(zip(stage.names, stage.layers, strict=True))
        norms = defer_batch_norm(self._layers()) if self.deferred_batch_norm else []
        self._engine = self._layout.engine(stages, norms)

    def _engine_of_layers(self) -> Engine:
        """The engine; a new one if layers were exchanged since the last mini-batch."""
        present = [layer for layer in self._layers() if not isinstance(layer, Elsewhere)]
        if [layer for stage in self.stages for layer in stage] != present:
            require_balance(self.balance, len(self))
            self._layout.update(self._layers())
            self._build()
        return self._engine

    def _output_dim(self) -> int:
        return self.split if isinstance(self.split, int) else 0

    def _input_batch(self, input: Any) -> Batch | None:
        """The input, where the first stage is here."""
        return Batch.of("input", input, self.split) if self.stages[0].index == 0 else None

    def _target_batch(self, target: Any) -> Batch | None:
        """The target, where the last stage is here."""
        return Batch.of("target", target, self._output_dim()) if self.has_last_stage else None

    def _size(self, batch: Batch | None, targets: Batch | None) -> Size:
        """What is known of the mini-batch, here and in other processes, before it begins."""
        trains = self.training and torch.is_grad_enabled()
        present = [each for each in (batch, targets) if each is not None]
        if batch is None:  # a target that is none, or is not cut, has no say
            present = [each for each in present if any(dim is not None for dim in each.dims)]
        rows = num_rows(*present) if present else 0
        if present and trains and rows == 0:
            raise ValueError(
                "The mini-batch has 0 rows: there is nothing to train on. Leave it out."
            )
        num_microbatches = max(1, min(self.chunks, rows))
        return self._engine.agree(batch, Size(rows, rows, num_microbatches, trains))

    def _require_backward_here(self) -> None:
        if self._layout.pipe is not None and self.training and torch.is_grad_enabled():
            raise RuntimeError(
                "On a mesh the loss is taken on the last worker, and a backward() here could not "
                "reach the others. Train with step(input, target, loss_fn); to evaluate, call "
                "eval() first, or the model under torch.no_grad()."
            )

    def _given_out(self, whole: Boundary | None, broadcast_output: bool) -> Any:
        """The output, for this process or for all."""
        if broadcast_output and isinstance(self._engine, DistributedEngine):
            whole = self._engine.broadcast(whole)
        return whole and unpack(whole)

    def _train(
        self, batch: Batch | None, size: Size, head: LossHead | None, loss_fn: LossFunction
    ) -> Ended:
        if self._layout.pipe is None:
            warn_of_replicas()
        schedule = self._layout.orders.of_step(size.num_microbatches, self.checkpoint)
        of_loss, names = parameters_of_loss(loss_fn) if head else ([], {})
        return self._engine.step(batch, schedule, head, names | self._trained(), of_loss)

    def _trained(self) -> dict[Parameter, str]:
        """The parameters that get gradients, each once, with their names."""
        named = self.named_parameters()
        return {parameter: name for name, parameter in named if parameter.requires_grad}
