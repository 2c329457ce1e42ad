"""Schedules: the order of a mini-batch, as data."""

from gpipe.schedule.action import Action, Kind, Transfer
from gpipe.schedule.check import check
from gpipe.schedule.dependencies import predecessors
from gpipe.schedule.file import load_schedule, save_schedule
from gpipe.schedule.fill_drain import fill_drain
from gpipe.schedule.held import peak_held
from gpipe.schedule.interleaved import interleaved_1f1b
from gpipe.schedule.looped_breadth_first import looped_breadth_first
from gpipe.schedule.notation import from_text, to_text
from gpipe.schedule.one_f_one_b import one_f_one_b
from gpipe.schedule.passes import RECOMPUTE_MODES, add_recompute
from gpipe.schedule.registry import (
    LOOPED_SCHEDULES,
    SCHEDULE_NAMES,
    SCHEDULES,
    Builder,
    LoopedBuilder,
    as_schedule,
    resolve,
)
from gpipe.schedule.schedule import Schedule
from gpipe.schedule.text import grid, picture, unit_slots
from gpipe.schedule.torch_csv import from_csv, to_csv
from gpipe.schedule.transfers import add_transfers

__all__ = [
    "LOOPED_SCHEDULES",
    "RECOMPUTE_MODES",
    "SCHEDULES",
    "SCHEDULE_NAMES",
    "Action",
    "Builder",
    "Kind",
    "LoopedBuilder",
    "Schedule",
    "Transfer",
    "add_recompute",
    "add_transfers",
    "as_schedule",
    "check",
    "fill_drain",
    "from_csv",
    "from_text",
    "grid",
    "interleaved_1f1b",
    "load_schedule",
    "looped_breadth_first",
    "one_f_one_b",
    "peak_held",
    "picture",
    "predecessors",
    "resolve",
    "save_schedule",
    "to_csv",
    "to_text",
    "unit_slots",
]
