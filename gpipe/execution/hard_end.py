"""Ends a process whose main thread does not come back."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

__all__ = ["end_hard", "main_thread_place", "say"]

_SAY_S = 1.0


def say(text: str) -> None:
    """Write to stderr in one piece, and wait a second at most."""
    _within(_SAY_S, lambda: _write(text))


def end_hard() -> None:
    """End this process at once, as failed; no `finally` and no `atexit` runs."""
    _within(_SAY_S, _flush)
    os._exit(1)


def main_thread_place() -> str:
    """Where the main thread is, in Python: "train.py:10 in load"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "nowhere"
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"


def _within(timeout_s: float, task: Callable[[], None]) -> None:
    # A main thread that is stuck in writing to a full pipe holds the lock of the file.
    thread = threading.Thread(target=task, name="say", daemon=True)
    thread.start()
    thread.join(timeout_s)


def _write(text: str) -> None:
    with suppress(Exception):  # a file that is closed or none: there is nobody to tell
        sys.stderr.write(text)
        sys.stderr.flush()


def _flush() -> None:
    for file in (sys.stdout, sys.stderr):
        with suppress(Exception):
            file.flush()
