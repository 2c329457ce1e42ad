"""What a run will need and how long it will take, before it starts."""

from gpipe.plan.all_reduce import one_reducer_s, ring_bytes, ring_s
from gpipe.plan.device_spec import DeviceSpec
from gpipe.plan.memory import StageMemory
from gpipe.plan.plan import Plan, plan
from gpipe.plan.search import Found, Grid, search

__all__ = [
    "DeviceSpec",
    "Found",
    "Grid",
    "Plan",
    "StageMemory",
    "one_reducer_s",
    "plan",
    "ring_bytes",
    "ring_s",
    "search",
]
