"""What a run will need and how long it will take, before it starts."""

from gpipe.plan.device_spec import DeviceSpec
from gpipe.plan.memory import StageMemory
from gpipe.plan.plan import Plan, plan
from gpipe.plan.search import Found, Grid, search

__all__ = ["DeviceSpec", "Found", "Grid", "Plan", "StageMemory", "plan", "search"]
