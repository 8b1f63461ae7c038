"""The parts of owners (tenants) in what all of them need: `FairTurns` of work that waits, `Shares`
of room.

`FairTurns` is the order in which waiting work is done, so that each owner gets its part by the work
and not by the number of its requests: start-time fair queueing (Goyal, Vin and Chen, 1996), without
I/O or clock. A request's turn comes where the work of its owner before it ends, or now, if its
owner has had less than others:

    turn = max(virtual time, end of the owner's work before, its turn before);  end = turn + work

The virtual time is the turn of the request that was begun last. Of two owners that have work
waiting all the time, neither is ahead of the other by more than the largest request of each. For
one owner alone the order is that of arrival.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

TIMES_FREE: Final = 7
"""Of room for requests and files: a single owner has seven eighths of it, two seven fifteenths
each."""

MOST_OWNERS: Final = 1024
"""Owners whose work is remembered; from there on those that are owed nothing are forgotten."""


class FairTurns:
    """The turns of one queue."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}
        # Corrections may move an owner's end before what it has waiting, which nothing overtakes.
        self._latest: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<FairTurns [{len(self._ends)} owners]>"

    def take(self, owner: str, work: float) -> float:
        """The turn of a request that arrives; a lower one comes first, then the earlier one.

        Args:
            work: predicted, in any unit.
        """
        turn = max(self._now, self._ends.get(owner, 0.0), self._latest.get(owner, 0.0))
        if owner not in self._ends and len(self._ends) >= MOST_OWNERS:
            self._ends = {one: end for one, end in self._ends.items() if end > self._now}
            self._latest = {one: self._latest[one] for one in self._ends}
        self._ends[owner] = turn + work
        self._latest[owner] = turn
        return turn

    def begin(self, turn: float) -> None:
        """A request is begun."""
        self._now = max(self._now, turn)

    def correct(self, owner: str, more: float) -> None:
        """A request took so much more work than was predicted, less where it is negative."""
        if owner in self._ends:
            self._ends[owner] += more


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
