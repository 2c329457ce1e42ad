"""What to say when a stage has run out of memory."""

import torch

from gpipe.schedule import Action
from gpipe.stage.run import StageRun
from gpipe.units import show_bytes

__all__ = ["is_out_of_memory", "memory_note"]

# torch has no class for it on the CPU.
_OF_THE_HOST = "DefaultCPUAllocator: can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory left, on whatever device."""
    by_class = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return by_class or (isinstance(error, RuntimeError) and _OF_THE_HOST in str(error))


def memory_note(run: StageRun, action: Action) -> str:
    """Who held how much, and what would help.

    Args:
        run: The stage that had no memory left.
        action: What it was about to do.
    """
    stage = run.stage
    return (
        f"gpipe: out of memory in stage {stage.index} on {stage.device}, micro-batch "
        f"{action.microbatch}. It held {run.num_held} micro-batches with "
        f"{show_bytes(run.held_bytes())}{_in_use(run)}. "
        "Raise chunks, choose checkpoint='always', or give the stage fewer layers in balance."
    )


def _in_use(run: StageRun) -> str:
    memory = run.stage.runs_on.memory()
    if memory is None:
        return ""
    return (
        f"; this process has {show_bytes(memory.allocated_bytes)} of the device's "
        f"{show_bytes(memory.total_bytes)} in use, {show_bytes(memory.free_bytes)} are free"
    )
