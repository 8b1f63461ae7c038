"""The processes that a run of vLLM has started, as Linux tells of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def processes_below(pid: int, title: str) -> list[int]:
    """Running processes that descend from another one, and have such a title."""
    found: list[int] = []
    for line in children_of(pid):
        found += [line, *processes_below(line, "")]
    return [one for one in found if title in title_of(one)]


def children_of(pid: int) -> Iterator[int]:
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (thread / "children").read_text().split())
    except OSError:
        return


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
