"""`Ledger`: what the front ends of a bus have of one tenant's limits, without I/O or clock.

Each front end leases a part of every limit and serves from that. The ledger is the record that all
of them change by compare-and-swap: `Ledger.settle` is the change that one of them makes.

Minutes and months are counted from the beginning of 1970 by the server's clock, months by UTC.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from .limits import BUDGET, COUNTED, HELD, PER_MINUTE, PER_MONTH

LEASE_SECONDS: Final = 15.0
"""Seconds after which what a front end has is free again, unless that has said that it lives."""

MINUTE: Final = 60.0


class Window(NamedTuple):
    """The minute and the month that amounts are of."""

    minute: int
    month: int


def window_of(unix: float) -> Window:
    """The window of a time in Unix seconds."""
    date = datetime.fromtimestamp(unix, UTC)
    return Window(int(unix // MINUTE), date.year * 12 + date.month - 1)


def ended_between(before: Window, after: Window) -> frozenset[str]:
    """The limits that have begun anew between two windows."""
    if before == after:
        # As for nearly every request.
        return frozenset()
    minutes = PER_MINUTE if before.minute != after.minute else ()
    months = PER_MONTH if before.month != after.month else ()
    return frozenset((*minutes, *months))


def end_of(name: str, window: Window) -> float:
    """The time at which a limit begins anew, in Unix seconds; that of the minute's end for those
    that do not."""
    if name not in PER_MONTH:
        return (window.minute + 1) * MINUTE
    year, month = divmod(window.month + 1, 12)
    return datetime(year, month + 1, 1, tzinfo=UTC).timestamp()


class Holder(msgspec.Struct):
    """The part of a front end.

    Attributes:
        until: when its lease ends, in Unix seconds.
        has: what it may use in the window of the ledger, and what it has used of that, by limit.
        used: as it has said itself.
    """

    until: float
    has: dict[str, int]
    used: dict[str, int]


class Statement(NamedTuple):
    """The words of a front end about its part, by limit.

    Attributes:
        window: of what it has used.
        used: of a limit that is given back, what it holds now.
        keeps: what it goes on to have of what it had, with what it has used.
        needs: what it would use at once beyond what it keeps.
        counted: what counts as used by it where its lease has ended since it was heard last.
        leaves: whether it needs nothing more.
    """

    window: Window
    used: Mapping[str, int]
    keeps: Mapping[str, int]
    needs: Mapping[str, int]
    counted: Mapping[str, int]
    leaves: bool = False


class Part(NamedTuple):
    """The answer of the ledger to a front end, by limit.

    Attributes:
        has: what it may use in this window, with what it has used.
        used: what of it counts as used.
        room: what nobody has.
        idle: what other front ends have and have not used.
        others: what is used by other front ends, also by those that are gone.
        members: front ends that have a part, this one with them.
    """

    window: Window
    has: Mapping[str, int]
    used: Mapping[str, int]
    room: Mapping[str, int]
    idle: Mapping[str, int]
    others: Mapping[str, int]
    members: int


class Ledger(msgspec.Struct):
    """The parts of all front ends in one tenant's limits.

    Attributes:
        minute, month: the window that amounts are of.
        spent: what is used of a window by front ends that are gone.
    """

    minute: int = 0
    month: int = 0
    spent: dict[str, int] = {}
    holders: dict[str, Holder] = {}

    @property
    def window(self) -> Window:
        """The window that its amounts are of."""
        return Window(self.minute, self.month)

    def settle(
        self, limits: Mapping[str, int], me: str, said: Statement, now: float
    ) -> tuple[Ledger, Part]:
        """The ledger after a front end has spoken, and the part that it has from now on.

        What it has used counts, also where that is more than it had. It gets more only of what
        nobody has: what it needs, and beside that half of its share, so that the next need costs no
        question.

        Args:
            limits: by name.
            now: Unix seconds of the server; a window that has begun is not left for an earlier one.
        """
        after = self._at(now)
        before = after.holders.pop(me, None)
        used = _used(said, after.window, is_known=before is not None)
        taken, idle = Counter(after.spent), Counter[str]()
        others = Counter(after.spent)
        for holder in after.holders.values():
            taken.update(holder.has)
            others.update(holder.used)
            idle.update({name: has - holder.used.get(name, 0) for name, has in holder.has.items()})
        members = len(after.holders) + 1
        # What is used of a limit that is none now counts if it is one again.
        has = {name: amount for name, amount in used.items() if name not in limits}
        room: dict[str, int] = {}
        had = {} if before is None else before.has
        for name, limit in limits.items():
            mine, need = used.get(name, 0), said.needs.get(name, 0)
            mine = max(mine, min(said.keeps.get(name, 0), had.get(name, 0)))
            free = max(0, limit - taken[name] - mine)
            more = min(free, max(need, free // (2 * members))) if need else 0
            if mine + more:
                has[name] = mine + more
            room[name] = free - more
        if said.leaves:
            after._spend(used)
            return after, Part(after.window, {}, {}, room, idle, others, members)
        after.holders[me] = Holder(now + LEASE_SECONDS, has, used)
        return after, Part(after.window, has, used, room, idle, others, members)

    def _at(self, now: float) -> Ledger:
        """A copy at a time: without what was of earlier windows, and without who is gone."""
        at = window_of(now)
        window = Window(max(self.minute, at.minute), max(self.month, at.month))
        over = ended_between(self.window, window)
        after = Ledger(*window, _without(self.spent, over), {})
        for name, holder in self.holders.items():
            if holder.until > now:
                has, used = _without(holder.has, over), _without(holder.used, over)
                after.holders[name] = Holder(holder.until, has, used)
                continue
            # It may have used all of its minute since it spoke. A month is long, so that what it
            # has not said it used is given back.
            used = {BUDGET: holder.used.get(BUDGET, 0)}
            after._spend(_without({**holder.has, **used}, over))
        return after

    def _spend(self, amounts: Mapping[str, int]) -> None:
        for name, amount in amounts.items():
            if amount and name not in HELD:
                self.spent[name] = self.spent.get(name, 0) + amount


def _used(said: Statement, window: Window, *, is_known: bool) -> dict[str, int]:
    """The amounts that are said to be used, less those of earlier windows or that count already."""
    over = ended_between(said.window, window)
    counted: Mapping[str, int] = {} if is_known else said.counted
    left = {
        name: said.used.get(name, 0) - counted.get(name, 0) for name in COUNTED if name not in over
    }
    return {name: amount for name, amount in left.items() if amount > 0}


def _without(amounts: Mapping[str, int], names: Set[str]) -> dict[str, int]:
    return {name: amount for name, amount in amounts.items() if name not in names}
