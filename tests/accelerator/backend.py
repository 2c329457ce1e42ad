"""Eight asynchronous accelerators without hardware, `deferred:0` to `deferred:7` (see backend.cpp).

Registering cannot be undone: each test runs in a process of its own. It says when tasks run by
`torch.ops.deferred.set_policy`, and gets what the detector has found from `take_reports` there.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

__all__ = ["NAME", "needs_compiler", "run_alone", "run_here"]

NAME = "deferred"
HERE = Path(__file__).parent
has_compiler = shutil.which(os.environ.get("CXX", "c++")) and shutil.which("ninja")
needs_compiler = pytest.mark.skipif(not has_compiler, reason="needs a C++ compiler and ninja")


def run_alone(*module_and_arguments: str) -> None:
    """Run a module as a program; the first of all builds the backend, in half a minute."""
    command = [sys.executable, "-m", *module_and_arguments]
    root = HERE.parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def run_here(check: Callable[[], None]) -> None:
    """Make the devices this process's, run a check on them, and end."""
    from torch.utils import cpp_extension

    torch.utils.rename_privateuse1_backend(NAME)
    source, flags = str(HERE / "backend.cpp"), ["-O1", "-g0"]
    cpp_extension.load(f"gpipe_{NAME}", source, extra_cflags=flags, is_python_module=False)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    check()
    # At a normal exit, a thread of autograd that lets go of its last Python object would abort.
    os._exit(0)


def _module() -> Any:
    """`torch.deferred`, with what torch looks for in the module of any device."""

    def generator(device: Any) -> torch.Generator:
        index = torch.device(device).index
        if index is None:
            index = torch.accelerator.current_device_index()
        return torch.ops.deferred.default_generator(index)

    return SimpleNamespace(
        _initialized=True,
        _is_in_bad_fork=lambda: False,
        is_available=lambda: True,
        device_count=lambda: 8,
        current_device=torch.accelerator.current_device_index,
        device=torch.accelerator.device_index,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        manual_seed_all=lambda seed: [generator(f"{NAME}:{i}").manual_seed(seed) for i in range(8)],
        get_rng_state=lambda device=NAME: generator(device).get_state(),
        set_rng_state=lambda state, device=NAME: generator(device).set_state(state),
    )
