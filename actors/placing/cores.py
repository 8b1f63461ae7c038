"""The number of cores of this process."""

from __future__ import annotations

import os

from dynbus.bus.config import WORKER_CORES


def usable_cores() -> int:
    """The cores that this process may use: a container or `taskset` may leave it fewer, and so may
    `dynbus run` by the `cpu` that its actor declares."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    declared = os.environ.get(WORKER_CORES, "")
    return min(count, int(declared)) if declared.isdecimal() and int(declared) else count
