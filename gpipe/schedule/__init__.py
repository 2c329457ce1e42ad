"""Schedules: the order of a mini-batch, as data."""

from gpipe.schedule.action import Action, Kind
from gpipe.schedule.check import check
from gpipe.schedule.dependencies import predecessors
from gpipe.schedule.fill_drain import fill_drain
from gpipe.schedule.held import peak_held
from gpipe.schedule.one_f_one_b import one_f_one_b
from gpipe.schedule.passes import RECOMPUTE_MODES, add_recompute
from gpipe.schedule.registry import SCHEDULES, Builder, resolve
from gpipe.schedule.schedule import Schedule
from gpipe.schedule.text import grid, picture, unit_slots

__all__ = [
    "RECOMPUTE_MODES",
    "SCHEDULES",
    "Action",
    "Builder",
    "Kind",
    "Schedule",
    "add_recompute",
    "check",
    "fill_drain",
    "grid",
    "one_f_one_b",
    "peak_held",
    "picture",
    "predecessors",
    "resolve",
    "unit_slots",
]
