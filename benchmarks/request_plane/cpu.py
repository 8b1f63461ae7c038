"""The processor time of processes (Linux)."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Mapping


def cpu_seconds(processes: Iterable[int]) -> dict[int, float]:
    """User and system time used so far, all threads of a process together, by process id.

    Processes that are gone are left out. The process's own clock counts nanoseconds; the times in
    /proc count ticks of 10 ms, in which a short measurement can find nothing at all.
    """
    used: dict[int, float] = {}
    for pid in processes:
        try:
            used[pid] = time.clock_gettime(_clock(pid))
        except OSError as failed:
            if failed.errno != errno.EINVAL:
                raise
            # It is gone: Ray ends workers that it has no use for.
    return used


def _clock(pid: int) -> int:
    """The clock of a process's time on a core, as clock_getcpuclockid(3) makes it on Linux."""
    return (~pid << 3) | 2


def cpu_used(before: Mapping[int, float], after: Mapping[int, float]) -> dict[int, float]:
    """Seconds used between two measurements, of the processes alive at both."""
    return {pid: after[pid] - used for pid, used in before.items() if pid in after}
