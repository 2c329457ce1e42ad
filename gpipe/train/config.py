"""What a run file may say, as frozen, checked data."""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from gpipe.train.diagnosis import diagnose
from gpipe.train.mistake import RunFileError
from gpipe.train.overrides import override
from gpipe.train.run_file import read
from gpipe.units import parse_bytes

__all__ = [
    "BALANCED_BY",
    "MOST",
    "BalancedBy",
    "DataConfig",
    "LossName",
    "LrScheduleConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "PlanConfig",
    "RunConfig",
    "TrainConfig",
    "load",
]

# A field's description says what is allowed: errors print it, so it is written once.
LossName = Literal["cross_entropy", "nll", "mse", "l1", "smooth_l1", "bce_with_logits"]
_LOSSES = "cross_entropy, nll, mse, l1, smooth_l1, bce_with_logits"
_FACTORY = '"module:callable", for example "gpipe.models:mlp"'
ScheduleName = Literal["fill_drain", "1f1b", "interleaved_1f1b", "looped_breadth_first"]
_SCHEDULES = "fill_drain, 1f1b, interleaved_1f1b or looped_breadth_first"
BalancedBy = Literal["time", "memory", "flops", "parameters"]
BALANCED_BY = get_args(BalancedBy)
_Factory = Annotated[str, Field(pattern=r"^[^:\s]+:[^:\s]+$", description=_FACTORY)]
_Count = Annotated[
    int, Field(ge=1, le=10**15, description="a whole number, 1 or more, up to 10^15")
]
# A schedule has that many actions and more for each stage.
_Chunks = Annotated[
    int, Field(ge=1, le=2**16, description="a whole number, 1 or more, up to 65536")
]


MOST = 1e30  # sums and products of such numbers stay finite


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _OpenSection(_Section):
    """A section whose further keys are arguments of what it names."""

    model_config = ConfigDict(extra="allow")

    @property
    def arguments(self) -> dict[str, object]:
        """The further keys, by name."""
        return dict(self.model_extra or {})


class ModelConfig(_OpenSection):
    """Which `nn.Sequential` is trained; the other keys are the factory's arguments."""

    factory: _Factory


class DataConfig(_OpenSection):
    """Which rows are trained on; the other keys are the factory's arguments."""

    factory: _Factory
    batch_size: _Count


def _balance(value: object) -> object:
    rule = PydanticCustomError("balance", "balance")
    if isinstance(value, str) and value in BALANCED_BY:
        return value
    if not isinstance(value, list | tuple) or not value:
        raise rule
    if not all(type(count) is int and count >= 1 for count in value):
        raise rule
    return tuple(value)


class PipelineConfig(_Section):
    """How the model is cut and in what order it runs: the keyword arguments of `GPipe`."""

    stages: _Count | None = Field(
        None,
        description="a whole number, 1 or more; left out: as many as balance lists, or devices",
    )
    balance: Annotated[BalancedBy | tuple[int, ...], PlainValidator(_balance)] = Field(
        "parameters",
        description="time, memory, flops, parameters, or the number of layers of each stage, such "
        "as [2, 2, 1]",
    )
    chunks: _Chunks = 1
    schedule: ScheduleName = Field("1f1b", description=_SCHEDULES)
    checkpoint: Literal["always", "except_last", "never"] = Field(
        "except_last", description="always, except_last or never"
    )
    devices: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        strict=False,  # YAML has lists
        description='a list with a device for each worker, such as ["cuda:0", "cuda:1"]',
    )
    deferred_batch_norm: bool = Field(False, description="true or false")
    processes: bool = Field(
        False, description="true: a process for each worker, started by torchrun; or false"
    )
    replicas: _Count = 1
    all_reduce: Literal["backend", "ring", "none"] = Field(
        "backend", description="backend, ring or none: how gradients of replicas are summed"
    )
    patience_s: float = Field(
        8.0,
        gt=0,
        description="seconds, more than 0, for which a process may give no sign of life",
    )
    watchdog_s: float | None = Field(
        None,
        gt=0,
        description="seconds, more than 0, in which nothing moves until all processes tell what "
        "they wait for; left out: never",
    )

    @model_validator(mode="after")
    def _stages_fit_balance(self) -> Self:
        if self.stages is None or isinstance(self.balance, str):
            return self
        if len(self.balance) != self.stages:
            raise PydanticCustomError(
                "told",
                "lists {listed} stages, but `stages` is {stages}."
                " Give one number of layers for every stage, or leave `stages` out.",
                {"key": "balance", "listed": len(self.balance), "stages": self.stages},
            )
        return self


class OptimizerConfig(_OpenSection):
    """Which class of `torch.optim`; the other keys are its arguments."""

    name: str = Field(min_length=1, description="a class of torch.optim, such as AdamW")


class LrScheduleConfig(_Section):
    """How the learning rate goes: linear warm-up, then `name`, step by step."""

    name: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="constant, cosine or linear (the last two end at 0)"
    )
    warmup_steps: int = Field(0, ge=0, description="a whole number, 0 or more")


class TrainConfig(_Section):
    """How long, how precisely, how tamed."""

    epochs: _Count = 1
    precision: Literal["fp32", "bf16"] = Field("fp32", description="fp32 or bf16 (autocast)")
    clip_grad_norm: float | None = Field(
        None, gt=0, description="a number greater than 0; left out: no clipping"
    )


def _bytes(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise PydanticCustomError("bytes", "bytes")
    try:
        number = parse_bytes(value)
    except ValueError:
        number = inf
    if number > MOST:
        raise PydanticCustomError("bytes", "bytes")
    return number


def _bytes_per_s(value: object) -> float:
    number = _bytes(value)
    if 0 < number < 1:  # a transfer would take longer than a number can say
        raise PydanticCustomError("bytes", "bytes")
    return number


_Bytes = Annotated[float, PlainValidator(_bytes)]


class PlanConfig(_Section):
    """What `gpipe plan` is to know of the devices."""

    devices: _Count | None = Field(
        None,
        description="a whole number, 1 or more, of the devices there are; left out: as many as "
        "pipeline.devices lists, or one for each stage",
    )
    memory: _Bytes | None = Field(
        None,
        description='bytes that stages may use of a device, such as "16 GiB"; left out: what the '
        "accelerators here have, or no limit on the CPU",
    )
    flops: float | None = Field(
        None,
        ge=1,
        le=MOST,
        strict=False,
        description="a number from 1 to 1e30 of floating-point operations that a device does in a "
        "second in practice, such as 100e12: layers are then counted, not measured",
    )
    bandwidth: Annotated[float, PlainValidator(_bytes_per_s)] | None = Field(
        None,
        description='bytes a second over the link to the next device, such as "12 GB", at least 1, '
        "or 0 for no limit; left out: measured between the accelerators here, or no limit",
    )
    latency_s: float = Field(
        0.0, ge=0, le=86_400, description="seconds of each transfer, from 0 to those of a day"
    )
    accumulates: bool = Field(
        False, description="true where gradients of several mini-batches are added up"
    )


class RunConfig(_Section):
    """A whole run file.

    `name`, `model`, `data`, `loss` and `optimizer` must be there; the rest has the defaults
    that stand here.
    """

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="letters, digits, `.`, `_` and `-`, starting with a letter or digit",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="a whole number, 0 or more")
    model: ModelConfig
    data: DataConfig
    loss: LossName | _Factory = Field(description=f'{_LOSSES} or "module:callable"')
    loss_reduction: Literal["mean", "sum", "weighted"] | None = Field(
        None, description="mean, sum or weighted; left out: mean"
    )
    pipeline: PipelineConfig = PipelineConfig()
    optimizer: OptimizerConfig
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    train: TrainConfig = TrainConfig()
    plan: PlanConfig = PlanConfig()
    output_dir: str = Field("runs", min_length=1, description="the path of a folder")


def load(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks a run file.

    Args:
        path: The YAML file.
        overrides: Texts `key.path=value`, set before anything is checked.

    Raises:
        ConfigError: Something is wrong; every mistake is in the one message.
    """
    content = override(read(Path(path)), overrides)
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise RunFileError(diagnose(error, RunConfig), str(path)) from None
