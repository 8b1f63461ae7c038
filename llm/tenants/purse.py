"""`Purse`: what one front end has of a tenant's limits, without I/O or clock.

Times are Unix seconds by the server's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from .ledger import (
    LEASE_SECONDS,
    MINUTE,
    Part,
    Statement,
    Window,
    end_of,
    ended_between,
    window_of,
)
from .limits import HELD, PER_MINUTE, PER_MONTH

LOOK_AGAIN: Final = 1.0
"""Seconds after which a limit of which nothing was left is asked for again: others may have given
something back."""

UNKNOWN_MEMBERS: Final = 4
"""Front ends that one counts on which has never been told how many there are."""


class Shortage(NamedTuple):
    """A limit of which there is not enough.

    Attributes:
        limit: its number.
        left: what can be had of it here now.
        retry_after: seconds until there may be more.
        amount: that is needed.
        elsewhere: what other front ends have of it, and have not said that they used.
    """

    name: str
    limit: int
    left: int
    retry_after: float
    amount: int
    elsewhere: int

    @property
    def is_final(self) -> bool:
        """True if the limit never leaves so much."""
        return self.amount > self.limit


class Standing(NamedTuple):
    """The used and the remaining part of a limit, at all front ends together.

    Attributes:
        limit: its number.
        used: may be more than that.
        remaining: what a request would be granted here.
        resets_at: when it begins anew, in Unix seconds; None for one that is given back.
    """

    limit: int
    used: int
    remaining: int
    resets_at: float | None


class Taken(NamedTuple):
    """Amounts that were taken, and of which window, so that they can be given back."""

    window: Window
    amounts: dict[str, int]


class Purse:
    """The part of one front end in a tenant's limits.

    While the ledger cannot be reached, it may use what it has and an equal share of what nobody had
    when it last heard; of a window that began since then an equal share of the limit, which is one
    at least.

    Args:
        limits: by name.

    Attributes:
        is_cut_off: whether the ledger did not answer when it was asked last.
        open: requests that may still settle what they took.
        unsettled: amounts that were taken and are not settled.
        taken_at: when anything was taken last.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.limits = limits
        self.is_cut_off = False
        self.open = self.unsettled = 0
        self.taken_at = 0.0
        self._window = Window(0, 0)
        self._turns_at = 0.0
        self._has: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self._room: dict[str, int] = dict(limits)
        self._idle: Mapping[str, int] = {}
        self._others: dict[str, int] = {}
        self._members = UNKNOWN_MEMBERS
        # What the ledger knows of it, and since when.
        self._known_has: dict[str, int] = {}
        self._known_used: dict[str, int] = {}
        self._known_at = 0.0
        self._refused_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Purse {self._used} of {self._has}{' cut off' if self.is_cut_off else ''}>"

    @property
    def window(self) -> Window:
        """The window of what it has."""
        return self._window

    def change(self, limits: Mapping[str, int]) -> None:
        """Have other limits from now on; what is used stays so, also of a limit that is none now
        and may be one again."""
        for name in {*self.limits, *limits}:
            if name not in limits:
                for amounts in (self._has, self._room):
                    amounts.pop(name, None)
            elif limits[name] != self.limits.get(name):
                # The ledger says what there is of it.
                self._has.pop(name, None)
                self._refused_at.pop(name, None)
                self._room[name] = limits[name]
        self.limits = limits

    def take(self, amounts: Mapping[str, int], now: float) -> Taken | None:
        """Take amounts, all or none; None where there is not enough of one."""
        if now >= self._turns_at:
            self._turn(now)
        # Each request comes here.
        used, limits = self._used, self.limits
        has = self._has if not self.is_cut_off else {name: self._allowed(name) for name in amounts}
        taken: dict[str, int] = {}
        for name, amount in amounts.items():
            if name in limits and amount:
                taken[name] = total = used.get(name, 0) + amount
                if total > has.get(name, 0):
                    return None
        used.update(taken)
        for name in taken:
            taken[name] = amounts[name]
        self.taken_at = now
        self.unsettled += bool(taken)
        return Taken(self._window, taken)

    def settle(self, taken: Taken, real: Mapping[str, int]) -> None:
        """Have amounts that were taken be what was really used, less or more, of the same windows.

        What is more is used, whether it was there or not.
        """
        was, over = taken.amounts, ended_between(taken.window, self._window)
        for name in {*self.limits, *was}:
            more = real.get(name, 0) - was.get(name, 0)
            if more and name not in over:
                self._set_used(name, self._used.get(name, 0) + more)
        self.unsettled -= bool(was)
        taken.amounts.clear()

    def shortages(self, amounts: Mapping[str, int], now: float) -> list[Shortage]:
        """The limits of which there is not enough for amounts, as far as is known."""
        if now >= self._turns_at:
            self._turn(now)
        return [
            self._shortage(name, amount, now)
            for name, amount in amounts.items()
            if name in self.limits and self._used.get(name, 0) + amount > self._allowed(name)
        ]

    def _shortage(self, name: str, amount: int, now: float) -> Shortage:
        left = self.available(name)
        elsewhere = self.remaining(name) - left
        after = end_of(name, self._window) - now
        # What others have and do not use, or what runs, may be given back at any time.
        if amount <= left + elsewhere or name in HELD:
            after = min(after, LOOK_AGAIN)
        return Shortage(name, self.limits[name], left, after, amount, elsewhere)

    def available(self, name: str) -> int:
        """The amount of a limit that can be had here now, as far as is known."""
        own = self._allowed(name) - self._used.get(name, 0)
        return max(0, own + (0 if self.is_cut_off else self._room.get(name, 0)))

    def remaining(self, name: str) -> int:
        """The amount of a limit that no front end has used, as far as is known here."""
        own = self._allowed(name) - self._used.get(name, 0)
        others = 0 if self.is_cut_off else self._room.get(name, 0) + self._idle.get(name, 0)
        return max(0, own + others)

    def standings(self, now: float) -> dict[str, Standing]:
        """The limits by name, as far as is known here."""
        if now >= self._turns_at:
            self._turn(now)
        return {
            name: Standing(
                limit,
                self._others.get(name, 0) + self._used.get(name, 0),
                self.remaining(name),
                None if name in HELD else end_of(name, self._window),
            )
            for name, limit in self.limits.items()
        }

    def resets_in(self, name: str, now: float) -> float:
        """Seconds until a limit begins anew."""
        return max(0.0, end_of(name, self._window) - now)

    def may_ask(self, needs: Mapping[str, int], now: float) -> bool:
        """True if the ledger may have more for amounts than is known here."""
        return not self.is_cut_off and all(
            one.amount <= one.left
            or now - self._refused_at.get(one.name, -LOOK_AGAIN) >= LOOK_AGAIN
            for one in self.shortages(needs, now)
        )

    def state(self, needs: Mapping[str, int], now: float, *, leaves: bool = False) -> Statement:
        """The statement for the ledger. Where nothing is needed, more is given back than would last
        as long as it took to use up as much.

        Args:
            needs: what is to be taken.
        """
        if now >= self._turns_at:
            self._turn(now)
        used, has = self._used, self._has
        asked = {
            name: used.get(name, 0) + amount - has.get(name, 0)
            for name, amount in needs.items()
            if name in self.limits
        }
        asked = {name: amount for name, amount in asked.items() if amount > 0}
        if leaves:
            has.clear()
        elif not asked:
            for name in has:
                now_used = used.get(name, 0)
                pace = max(0, now_used - self._known_used.get(name, 0))
                has[name] = min(has[name], now_used + pace)
        counted = {
            **{name: self._known_has.get(name, 0) for name in PER_MINUTE},
            **{name: self._known_used.get(name, 0) for name in PER_MONTH},
        }
        return Statement(self._window, dict(used), dict(has), asked, counted, leaves)

    def accept(self, said: Statement, part: Part, now: float) -> None:
        """The ledger has answered a statement, which was made at `now`."""
        self.is_cut_off = False
        if part.window.minute > self._window.minute:
            self._enter(part.window)
        over = ended_between(said.window, self._window)
        for name, amount in said.used.items():
            if name not in over:
                # What counts already is not to be said again.
                self._set_used(name, self._used.get(name, 0) - amount + part.used.get(name, 0))
        # Of the limits whose window has ended meanwhile it has nothing.
        over = ended_between(part.window, self._window)
        self._has = {name: amount for name, amount in part.has.items() if name not in over}
        here = self.limits.keys() - over
        self._room |= {name: amount for name, amount in part.room.items() if name in here}
        self._known_has = dict(self._has)
        self._known_used = {name: amount for name, amount in part.used.items() if name not in over}
        self._idle, self._members = part.idle, part.members
        self._others = {name: amount for name, amount in part.others.items() if name not in over}
        self._known_at = now
        self._turns_at = min((self._window.minute + 1) * MINUTE, now + LEASE_SECONDS)
        # What it had, and needs beyond that, was of the window in which it spoke.
        over = ended_between(said.window, part.window)
        for name, need in said.needs.items():
            if name not in over and part.has.get(name, 0) - said.keeps.get(name, 0) < need:
                self._refused_at[name] = now

    def _set_used(self, name: str, amount: int) -> None:
        if amount > 0:
            self._used[name] = amount
        else:
            self._used.pop(name, None)

    def cut_off(self) -> None:
        """The ledger did not answer."""
        self.is_cut_off = True

    def is_known(self, now: float) -> bool:
        """True if the ledger was heard in the last second, or cannot be."""
        return self.is_cut_off or now - self._known_at < LOOK_AGAIN

    def is_due(self, now: float) -> bool:
        """True if the ledger should hear of it: something was used, is to be given back, or is held
        by a lease of which a third is over."""
        if now >= self._turns_at:
            self._turn(now)
        is_news = self._used != self._known_used or self._has != self._used
        return is_news or self.is_cut_off or now - self._known_at > LEASE_SECONDS / 3

    def _allowed(self, name: str) -> int:
        has = self._has.get(name, 0)
        if not self.is_cut_off:
            return has
        least = min(1, self.limits.get(name, 0))
        return has + max(self._room.get(name, 0) // self._members, 0 if has else least)

    def _turn(self, now: float) -> None:
        """A window or the lease is over."""
        window = window_of(now)
        if window.minute > self._window.minute:
            self._enter(window)
        if now >= self._known_at + LEASE_SECONDS and not self.is_cut_off:
            # Others may have what it has not used by now.
            for name in (*PER_MONTH, *HELD):
                if name in self._has:
                    self._has[name] = min(self._has[name], self._used.get(name, 0))
        self._turns_at = (self._window.minute + 1) * MINUTE

    def _enter(self, window: Window) -> None:
        """A later window begins, in which nothing is used yet."""
        over = ended_between(self._window, window)
        for name in over:
            amounts_of = self._has, self._used, self._others, self._known_has, self._known_used
            for amounts in amounts_of:
                amounts.pop(name, None)
            self._refused_at.pop(name, None)
            if name in self.limits:
                self._room[name] = self.limits[name]
        self._idle = {name: amount for name, amount in self._idle.items() if name not in over}
        self._window = window

    def begin_anew(self) -> None:
        """Have the window be that of the next time that is heard of: the clock was another one."""
        self._enter(Window(0, 0))
        self._turns_at = 0.0
