"""How many cores this process has."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The cores that this process may use: a container or `taskset` may leave it fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
