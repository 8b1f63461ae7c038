"""Room that owners (tenants) wait for, so that none keeps the others out."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from dynbus.kvrouter import fairness


class _Wait(NamedTuple):
    size: int
    is_taken: asyncio.Event


class SharedRoom:
    """Room that owners wait for, each behind its own requests alone.

    Args:
        shares: of it.
    """

    def __init__(self, shares: fairness.Shares) -> None:
        self._shares = shares
        self._waiting: dict[str, deque[_Wait]] = {}

    def __repr__(self) -> str:
        return f"<SharedRoom {self._shares!r} [{len(self._waiting)} owners wait]>"

    async def reserve(self, owner: str, size: int) -> None:
        """Take room for an owner as soon as that is within its share.

        A caller that is cancelled has taken nothing.

        Args:
            size: the limit is taken for more than that.
        """
        size = min(size, self._shares.limit)
        if owner not in self._waiting and self._shares.reserve(owner, size):
            return
        wait = _Wait(size, asyncio.Event())
        self._waiting.setdefault(owner, deque()).append(wait)
        try:
            await wait.is_taken.wait()
        except asyncio.CancelledError:
            if wait.is_taken.is_set():
                self.give_back(owner, size)
            else:
                self._waiting[owner].remove(wait)
                # What stood behind it may be smaller.
                self._admit()
            raise

    def try_reserve(self, owner: str, size: int) -> bool:
        """Take room for an owner, unless that is beyond its share or something of it waits; whether
        that is done."""
        return owner not in self._waiting and self._shares.reserve(owner, size)

    def give_back(self, owner: str, size: int) -> None:
        """Have room free again that an owner has taken, for waiting callers."""
        self._shares.give_back(owner, min(size, self._shares.limit))
        self._admit()

    def _admit(self) -> None:
        for owner, waiting in list(self._waiting.items()):
            while waiting and self._shares.reserve(owner, waiting[0].size):
                waiting.popleft().is_taken.set()
            if not waiting:
                del self._waiting[owner]
