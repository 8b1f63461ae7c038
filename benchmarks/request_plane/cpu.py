"""The processor time of processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import psutil


def cpu_seconds(processes: Iterable[int]) -> dict[int, float]:
    """User and system time used so far, all threads of a process together, by process id.

    Processes that are gone are left out.
    """
    used: dict[int, float] = {}
    for pid in processes:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:  # Ray ends workers that it has no use for
            continue
        used[pid] = float(times.user + times.system)
    return used


def cpu_used(before: Mapping[int, float], after: Mapping[int, float]) -> dict[int, float]:
    """Seconds used between two measurements, of the processes alive at both."""
    return {pid: after[pid] - used for pid, used in before.items() if pid in after}
