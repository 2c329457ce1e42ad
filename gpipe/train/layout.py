"""How many stages and workers a run file asks for."""

from typing import NamedTuple

from gpipe.pipeline import num_workers_of
from gpipe.plan.words import count
from gpipe.schedule import LOOPED_SCHEDULES
from gpipe.schedule.registry import resolve
from gpipe.stage.device import default_devices
from gpipe.train.config import RunConfig
from gpipe.train.mistake import Mistake, RunFileError

__all__ = ["Layout", "layout_of", "num_devices_of", "require_layers"]


class Layout(NamedTuple):
    """How a model is spread.

    Attributes:
        num_stages: Into how many stages it is cut.
        num_workers: How many share them, each with a device.
    """

    num_stages: int
    num_workers: int


def num_devices_of(config: RunConfig) -> int | None:
    """How many devices the file has: those it lists, else those that it says there are.

    `pipeline.devices` says what runs where, with one entry for each worker; `plan.devices` says
    how many there are on the machine that is planned for.

    Raises:
        RunFileError: The two contradict each other.
    """
    listed, told = config.pipeline.devices, config.plan.devices
    if listed is None or told is None or len(listed) == told:
        return len(listed) if listed is not None else told
    text = (
        f"is {told}, and pipeline.devices lists {len(listed)}. Leave one of them out, or let them "
        "agree."
    )
    raise RunFileError([Mistake("plan.devices", text)])


def layout_of(config: RunConfig, num_stages: int | None = None) -> Layout:
    """The numbers that the file says, or `num_stages` where that is asked for instead.

    Raises:
        RunFileError: Stages, devices and schedule do not go together.
    """
    pipeline, num_devices = config.pipeline, num_devices_of(config)
    listed = None if isinstance(pipeline.balance, str) else len(pipeline.balance)
    stages = num_stages or listed or pipeline.stages or num_devices or len(default_devices()) or 1
    workers = num_workers_of(pipeline.schedule, pipeline.devices)
    if pipeline.schedule in LOOPED_SCHEDULES and pipeline.devices is None:
        workers = num_devices or workers
    layout = Layout(stages, workers or stages)
    try:
        resolve(pipeline.schedule, stages, 1, layout.num_workers)
    except ValueError as error:
        raise RunFileError([Mistake("pipeline", str(error))]) from error
    _require_devices(config, layout)
    return layout


def require_layers(config: RunConfig, layout: Layout, num_layers: int) -> None:
    """Refuse a cut that the model has not the layers for.

    Raises:
        RunFileError: There are fewer layers than stages, or a list of another number of layers.
    """
    balance, layers = config.pipeline.balance, count(num_layers, "layer")
    if layout.num_stages > num_layers:
        text = f"{layers} cannot fill {layout.num_stages} stages. Lower `stages` or split a layer."
        raise RunFileError([Mistake("pipeline.stages", text)])
    if not isinstance(balance, str) and sum(balance) != num_layers:
        text = (
            f"{list(balance)} is {count(sum(balance), 'layer')}, and the model has {num_layers}. "
            f"Let the entries add up to {num_layers}."
        )
        raise RunFileError([Mistake("pipeline.balance", text)])


def _require_devices(config: RunConfig, layout: Layout) -> None:
    listed, told, num_workers = config.pipeline.devices, config.plan.devices, layout.num_workers
    if listed is not None and len(listed) != num_workers:
        text = f"lists {count(len(listed), 'device')} for {count(num_workers, 'worker')}."
        text += " List one for each."
        raise RunFileError([Mistake("pipeline.devices", text)])
    if told is not None and told < num_workers:
        text = (
            f"is {told}, and the run has {num_workers} workers, one for each of its stages. Lower "
            f"pipeline.stages to {told}, or see with `--search` what fits."
        )
        raise RunFileError([Mistake("plan.devices", text)])
