"""Garbage collection in processes that serve a model: rare, and never of long-lived objects.

No thread runs meanwhile, the control lane's neither. With 4,096 open streams of a front end that is
half a second of a processor, and a third of a second where vLLM is imported: on a busy machine so
long that others take the process for dead.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

THRESHOLDS: Final = (50_000, 2, 10)
"""Of `gc.set_threshold`: all objects are looked at after a million that outlived their youth.

A request leaves nothing that only a collection finds, so that the young ones are what runs: 512
answers at a time are 50,000 objects, which each collection would look at that comes before they
have ended. Opening thousands of streams makes half a million.
"""


class _Rare:
    """The users for whom collections are rare in this process, and the thresholds from before
    them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = gc.get_threshold()

    def enter(self) -> None:
        with self._lock:
            if not self._users:
                self._before = gc.get_threshold()
                gc.set_threshold(*THRESHOLDS)
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                gc.set_threshold(*self._before)


_rare: Final = _Rare()


@contextmanager
def rare_collections() -> Generator[None]:
    """Have full collections made rarely in this process until the last such block has ended."""
    _rare.enter()
    try:
        yield
    finally:
        _rare.leave()
