"""The end of a process in which user code may go on: threads above all, which nobody can cancel."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Final

LEAVE_SECONDS: Final = 2.0
"""Seconds for what goes on after the end of all instances: then it is left behind."""

logger = logging.getLogger(__name__)


def leave_within(
    code: int, seconds: float = LEAVE_SECONDS, say: Callable[[], None] | None = None
) -> threading.Timer:
    """End this process with the exit code `code` unless it has ended within `seconds`.

    To be called when all that matters is done. From then on the interpreter itself would wait
    without end: for each task that swallows its cancellation when a loop is closed, for the
    threads of an executor, and for all other threads at its exit.

    Args:
        say: called before that end.

    Returns:
        The timer, which can be cancelled.
    """
    timer = threading.Timer(seconds, leave_behind, (code, say))
    timer.daemon = True
    timer.start()
    return timer


def leave_behind(code: int, say: Callable[[], None] | None = None) -> None:
    """End this process now, although user code goes on in it, and say so."""
    names = ", ".join(thread.name for thread in running_threads())
    if names:
        logger.error(
            "what runs in a thread cannot be cancelled: it is left behind (threads: %s)", names
        )
    else:
        logger.error("a task goes on although it was cancelled: it is left behind")
    if say is not None:
        say()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit, at which the interpreter would wait for those threads.
    os._exit(code)


def running_threads() -> list[threading.Thread]:
    """The threads for which the interpreter waits before it ends."""
    return [
        thread
        for thread in threading.enumerate()
        if not thread.daemon
        and thread is not threading.main_thread()
        and thread is not threading.current_thread()
    ]
