"""`FairTurns`: the order in which owners (tenants) have their waiting work done, so that each gets
its part by the work and not by the number of its requests.

Start-time fair queueing (Goyal, Vin and Chen, 1996), without I/O or clock: a request's turn comes
where the work of its owner before it ends, or now, if its owner has had less than others:

    turn = max(virtual time, end of the owner's work before, its turn before);  end = turn + work

The virtual time is the turn of the request that was begun last. Of two owners that have work
waiting all the time, neither is ahead of the other by more than the largest request of each. For
one owner alone the order is that of arrival.
"""

from __future__ import annotations

from typing import Final

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
