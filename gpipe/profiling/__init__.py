"""Profiling: what each layer costs, measured without changing anything."""

from gpipe.profiling.running import profile, profile_memory
from gpipe.profiling.shapes import profile_meta

__all__ = ["profile", "profile_memory", "profile_meta"]
