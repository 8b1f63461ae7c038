"""The memory limit of the process of an instance, and what is told where it is reached."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Final

from dynbus.actors.declaring.resources import memory_text

NEARLY_FULL: Final = 0.9
LEAKED: Final = 0.75
"""Parts of a memory limit."""
RAISE: Final = "raise ServiceArgs.resources.memory if it needs more"
_REFUSALS: Final = ("cannot allocate memory", "can't allocate memory", "can't start new thread")
"""In what PyTorch and the system raise that is no `MemoryError`."""


class MemoryLimit:
    """The memory limit of this process, while it serves.

    Args:
        count: bytes; see `limit_memory`.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __str__(self) -> str:
        return f"the memory limit of {memory_text(self._count)}"

    def explain(self, error: BaseException) -> str:
        """The addition to a message about the error; nothing where it is another."""
        return f"; its process has {self}: {RAISE}" if _is_out_of_memory(error) else ""

    def detail(self) -> str:
        """The part of it that is in use, where that is most of it."""
        used = memory_in_use() / self._count
        return f"{used:.0%} of {self}" if used >= NEARLY_FULL else ""

    def reason_to_end(self) -> str:
        """The reason for which a process cannot go on in which a handler was refused memory: what
        it holds leaves no room for others. Nothing where that one alone wanted too much."""
        used = memory_in_use() / self._count
        return f"{used:.0%} of {self} is in use: {RAISE}" if used >= LEAKED else ""


def _is_out_of_memory(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = str(error).lower()
        if isinstance(error, MemoryError) or any(each in text for each in _REFUSALS):
            return True
        error = error.__cause__ or error.__context__
    return False


def limit_memory(count: int) -> None:
    """Have the system refuse this process and those that it starts more memory of their own than
    `count` bytes, each; what then asks for more gets a `MemoryError`.

    RLIMIT_DATA counts what is written to and is not shared. RLIMIT_AS also counts what is only
    reserved, as PyTorch, CUDA and every thread's arena do for far more than they use.
    """
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        count = min(count, most)
    resource.setrlimit(resource.RLIMIT_DATA, (count, most))


def memory_in_use() -> int:
    """Bytes that count towards the limit of `limit_memory`; Linux only."""
    match = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match is not None else 0
