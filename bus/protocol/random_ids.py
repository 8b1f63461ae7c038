"""Random ids, from the system's generator but not one system call each; and jitter."""

from __future__ import annotations

import os
import random
from typing import Final

_POOL_BYTES: Final = 4096

jitter: Final = random.Random()
"""For pauses and choices among equals, where nothing depends on secrecy.

Not the module's own generator: that is the program's, which may have seeded it."""


class _Pool:
    """Random bytes that are handed out once."""

    __slots__ = ("_bytes", "_position")

    def __init__(self) -> None:
        self._bytes = b""
        self._position = _POOL_BYTES

    def draw(self, count: int) -> bytes:
        if count > _POOL_BYTES:
            return os.urandom(count)
        end = self._position + count
        if end > _POOL_BYTES:
            self._bytes = os.urandom(_POOL_BYTES)
            self._position, end = 0, count
        taken = self._bytes[self._position : end]
        self._position = end
        return taken

    def forget(self) -> None:
        self._position = _POOL_BYTES


_pool = _Pool()


def forget_drawn() -> None:
    """Draw anew from `os.urandom`: what was drawn of it before is another's."""
    _pool.forget()


# A forked child must not hand out what its parent hands out too.
os.register_at_fork(after_in_child=forget_drawn)


def random_bytes(count: int) -> bytes:
    """`count` unpredictable bytes. For the main loop: not to be called from other threads."""
    return _pool.draw(count)


def random_id() -> str:
    """128 random bits as 32 hexadecimal digits. For the main loop."""
    return _pool.draw(16).hex()
