"""Calls of functions, counted in one thread: what a path costs whoever runs beside it.

A count is the same on a busy machine and a quiet one, so a test can hold it. It is no time: a call
of a C function counts as one of a Python function does.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from statistics import quantiles
from types import CodeType, FrameType
from typing import Any, Final

from .record import RECORD

SHOWN: Final = 40
LEAST_GAIN: Final = 0.02
"""The share by which a count may be below its record: where messages end is not always the same."""
NOISE: Final = 0.01
"""The share by which it may be above."""


class CallCount:
    """The calls since `counting` began, and the marks that were set meanwhile.

    Attributes:
        calls: how many.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._marks: list[int] = []
        self._python: Counter[CodeType] = Counter()
        self._c: Counter[tuple[str, CodeType]] = Counter()

    def mark(self) -> None:
        """One more of what is counted by is done."""
        self._marks.append(self.calls)

    def between_marks(self) -> float:
        """The calls from one mark to the next, in the lower quartile: what comes now and then, such
        as a heartbeat or a message in two pieces, only adds to them."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return quantiles((after - before for before, after in pairs), n=4)[0]

    def shown(self, units: int) -> str:
        """What was called most, so often for each unit."""
        found = {f"{_place(code)}:{code.co_qualname}": n for code, n in self._python.items()}
        for (name, code), n in self._c.items():
            key = f"{name} < {_place(code)}:{code.co_qualname}"
            found[key] = found.get(key, 0) + n
        most = Counter(found).most_common(SHOWN)
        return "\n".join(f"{n / units:8.2f}  {name}" for name, n in most)

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count what the interpreter tells of; for `sys.setprofile`."""
        if event == "call":
            self._python[frame.f_code] += 1
        elif event == "c_call":
            self._c[getattr(argument, "__qualname__", "?"), frame.f_code] += 1
        else:
            return
        self.calls += 1


def _place(code: CodeType) -> str:
    return "/".join(code.co_filename.split("/")[-2:])


@contextmanager
def counting() -> Generator[CallCount]:
    """Count the calls of this thread within the block."""
    count = CallCount()
    before = sys.getprofile()
    sys.setprofile(count.note)
    try:
        yield count
    finally:
        sys.setprofile(before)


def is_held(path: str, calls: float) -> bool:
    """True if a path takes the calls that are recorded of it."""
    recorded = RECORD[path]
    return recorded * (1 - LEAST_GAIN) <= calls <= recorded * (1 + NOISE)


def hold(path: str, calls: float, details: str) -> None:
    """Hold a path to its record: a test fails above it, and well below it as well, so that whoever
    lowers a count lowers the record.

    Args:
        path: as the record names it.
        calls: for each unit of it.
        details: what was called, for whoever looks for what has come to it.
    """
    print(f"{path}: {calls:.1f} calls of functions\n{details}")
    recorded = RECORD[path]
    assert calls <= recorded * (1 + NOISE), (
        f"{path}: {calls:.1f} calls of functions, and {recorded} are recorded; what is called most:"
        f"\n{details}"
    )
    assert calls >= recorded * (1 - LEAST_GAIN), (
        f"{path}: {calls:.1f} calls of functions where {recorded} are recorded: write the lower "
        "number into tests/budgets/record.py"
    )
