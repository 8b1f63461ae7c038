"""Shares: what owners (tenants) take of room that all of them need, so that none keeps the
others out.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Final, NamedTuple

TIMES_FREE_PLACES: Final = 7
"""Of places for requests: a single tenant has seven eighths of them, two seven fifteenths each."""


class Shares:
    """Room that owners take and give back.

    An owner may have so many times what it leaves free: something is there for the next one, and
    the more owners there are, the less each of them has. One that has nothing may take all that is
    free. The owner without a name is everybody, where there are no tenants, and may have all.

    Args:
        times: the free room that an owner may have.
    """

    def __init__(self, limit: int, times: int) -> None:
        self.limit: Final = limit
        self._times = times
        self._taken = 0
        self._taken_by = Counter[str]()

    def __repr__(self) -> str:
        return f"<Shares [{self._taken} of {self.limit}, {len(self._taken_by)} owners]>"

    @property
    def taken(self) -> int:
        """The room of all owners together."""
        return self._taken

    def reserve(self, owner: str, size: int = 1) -> bool:
        """Take room for an owner; False, and nothing is taken, where that is not within its
        share."""
        free = self.limit - self._taken - size
        before = self._taken_by.get(owner, 0)
        if free < 0 or (owner and before and before + size > self._times * free):
            return False
        self.take(owner, size)
        return True

    def take(self, owner: str, size: int = 1) -> None:
        """Note room that an owner has, whatever its share is."""
        self._taken += size
        self._taken_by[owner] += size

    def give_back(self, owner: str, size: int = 1) -> None:
        """Have room free again that an owner has taken."""
        self._taken -= size
        self._taken_by[owner] -= size
        if not self._taken_by[owner]:
            del self._taken_by[owner]


class _Wait(NamedTuple):
    size: int
    is_taken: asyncio.Event


class SharedRoom:
    """Room that owners wait for, each behind its own requests alone.

    Args:
        shares: of it.
    """

    def __init__(self, shares: Shares) -> None:
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
