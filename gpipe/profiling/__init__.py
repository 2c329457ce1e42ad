"""Profiling: what each layer costs, measured without changing anything."""

from gpipe.profiling.flops import WorkspaceWarning
from gpipe.profiling.links import link_bytes_per_s
from gpipe.profiling.running import profile, profile_memory
from gpipe.profiling.shapes import profile_meta

__all__ = ["WorkspaceWarning", "link_bytes_per_s", "profile", "profile_memory", "profile_meta"]
