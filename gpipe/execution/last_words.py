"""Hears of how this process ends."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

__all__ = ["LastWords"]


class LastWords:
    """Calls back before an uncaught exception is printed, and before the interpreter exits.

    An exception that ends the script goes through `sys.excepthook`; `SystemExit` does not, nor does
    anything in a process of `multiprocessing`, which catches all by itself. Of threads only those
    of gpipe count: a script goes on without its others. Whoever was hooked in before is called
    afterwards.
    """

    def __init__(
        self,
        on_error: Callable[[BaseException], None],
        on_thread_error: Callable[[BaseException], None],
        on_exit: Callable[[], None],
    ) -> None:
        self._on_error = on_error
        self._on_thread_error = on_thread_error
        self._on_exit = on_exit
        self._process_id = os.getpid()
        self._before, self._before_thread = sys.excepthook, threading.excepthook
        # Kept, since each access to a method makes a new object.
        self._hook, self._thread_hook = self._uncaught, self._uncaught_in_thread
        sys.excepthook, threading.excepthook = self._hook, self._thread_hook
        atexit.register(self._exit)
        self._is_active = True

    def restore(self) -> None:
        """Call back no more; somebody who has hooked in later stays."""
        self._is_active = False
        if sys.excepthook is self._hook:
            sys.excepthook = self._before
        if threading.excepthook is self._thread_hook:
            threading.excepthook = self._before_thread

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            if self._counts:
                self._on_error(error)
        finally:
            self._before(kind, error, trace)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        try:
            is_ours = args.thread is not None and args.thread.name.startswith("gpipe-")
            if is_ours and args.exc_value is not None and self._counts:
                self._on_thread_error(args.exc_value)
        finally:
            self._before_thread(args)

    def _exit(self) -> None:
        # Also after `restore`: threads inside the store must have ended before the interpreter
        # does.
        if os.getpid() == self._process_id:
            self._on_exit()

    @property
    def _counts(self) -> bool:
        return self._is_active and os.getpid() == self._process_id  # and not in a forked child
