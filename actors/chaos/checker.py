"""The invariants of a run under faults, checked item by item as they arrive.

Nothing here has a clock or I/O: times are seconds of one monotonic clock, given by the reader of
the streams.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Final

import msgspec

LATE: Final = 2.0
"""Seconds beyond its deadline after which the end of a call is late."""
VISIBLE: Final = 0.25
"""Seconds without an item, beyond the pause that the handler makes, that count as a stall."""
REACH: Final = 0.5
"""Seconds after a fault in which an item may still come that was on its way before."""
AROUND: Final = 1000
"""Items before and behind the next one among which one that is not the next is looked for."""
EXAMPLES: Final = 20
"""Violations that are kept with their words; beyond that they are counted."""


class Promise(StrEnum):
    """A promise that was not kept."""

    LOST = "an item is missing"
    DOUBLED = "an item came twice"
    WRONG = "an item is another one"
    AFTER_THE_END = "an item came after the end"
    SHORT = "a stream ended well before its last item"
    LONG = "a stream went on after its last item"
    FAILED = "a call failed that may not fail"
    UNTYPED = "a call ended in an error without a type"
    LATE = "a call ended after its deadline"
    HUNG = "a call did not end"
    NOT_WHOLE = "the run was not whole again after the last fault"


class Violation(msgspec.Struct, frozen=True):
    """One promise that was not kept, and by which call."""

    promise: Promise
    call: str
    details: str


class Stall(msgspec.Struct, frozen=True, order=True):
    """A time without an item.

    Attributes:
        seconds: from the fault; from the item before where there was none.
        at: when it ended.
        after: the kind of the fault that it followed; empty without one.
        call: of which it was, and after how many items.
    """

    seconds: float
    at: float
    after: str
    call: str


class Fault(msgspec.Struct, frozen=True):
    """A fault that was carried out: when it began, and which."""

    at: float
    kind: str


class Stalls:
    """The pauses in which streams had no item, measured from the fault before them.

    Attributes:
        by_kind: seconds from the fault to the next item, or the end, of each stream that stood
            still, by the kind of the fault.
        unexplained: seconds of stalls that no fault preceded: the machine was busy.
        longest: the longest ones of both.
    """

    def __init__(self) -> None:
        self._faults: deque[Fault] = deque(maxlen=1000)
        self.by_kind: dict[str, list[float]] = {}
        self.unexplained: list[float] = []
        self.longest: list[Stall] = []

    def fault(self, at: float, kind: str) -> None:
        """A fault begins now."""
        self._faults.append(Fault(at, kind))

    def gap(
        self, call: str, since: float, until: float, pause: float, *, replays: bool = False
    ) -> None:
        """A stream had no item from `since` to `until`, where `pause` was to be expected.

        Args:
            replays: whether it computes its items again when it moves: its stalls are told apart.
        """
        if until - since < pause + VISIBLE:
            return
        cause: Fault | None = None
        for fault in reversed(self._faults):
            if fault.at < since - REACH:
                break
            if fault.at < until - pause:
                cause = fault  # the first of them: the longest stall that it can be
        if cause is None:
            stall = Stall(until - since, until, "", call)
            self.unexplained.append(stall.seconds)
        else:
            after = f"{cause.kind}, replayed" if replays else cause.kind
            stall = Stall(until - max(cause.at, since - pause), until, after, call)
            self.by_kind.setdefault(after, []).append(stall.seconds)
        self.longest = sorted([*self.longest, stall], reverse=True)[:EXAMPLES]


class CallCheck:
    """One call, from its beginning to its end.

    Args:
        checker: of the run.
        call: how a violation names it.
        expected: the item with that index, None where there is none any more; None for a call of
            which nothing is known.
        pause: seconds between two items.
        now: when it began.
        timeout: seconds until its deadline; None without one.
        replays: see `Stalls.gap`.
    """

    __slots__ = (
        "_broken",
        "_call",
        "_checker",
        "_deadline",
        "_ended",
        "_expected",
        "_last",
        "_next",
        "_pause",
        "_replays",
        "got",
    )

    def __init__(
        self,
        checker: Checker,
        call: str,
        *,
        expected: Callable[[int], bytes | None] | None,
        pause: float,
        now: float,
        timeout: float | None,
        replays: bool,
    ) -> None:
        self._replays = replays
        self._checker = checker
        self._call = call
        self._expected = expected
        self._pause = pause
        self._last = now
        self._deadline = None if timeout is None else now + timeout
        self._ended = False
        self._broken: set[Promise] = set()
        # Of the item that is to come: not `got`, once one was lost or doubled.
        self._next = 0
        self.got = 0

    def item(self, item: bytes, now: float) -> None:
        """The next item arrived."""
        checker, index = self._checker, self.got
        self.got = index + 1
        checker.items += 1
        checker.stalls.gap(
            f"{self._call}, item {index}", self._last, now, self._pause, replays=self._replays
        )
        self._last = now
        if self._ended:
            self._violated(Promise.AFTER_THE_END, f"item {index}")
        if self._expected is None:
            return
        wanted = self._expected(self._next)
        if item == wanted:
            self._next += 1
            return
        promise, count = self._misplaced(item, wanted, self._expected)
        self._violated(promise, f"item {index} is {item[:80]!r}, not {wanted!r}", count)

    def _misplaced(
        self, item: bytes, wanted: bytes | None, expected: Callable[[int], bytes | None]
    ) -> tuple[Promise, int]:
        """The promise that an item at this place breaks, and the number of items concerned."""
        before = range(max(0, self._next - AROUND), self._next)
        if wanted is None:
            return Promise.LONG, 1
        if any(expected(index) == item for index in before):
            return Promise.DOUBLED, 1
        for lost in range(1, AROUND):
            if expected(self._next + lost) == item:
                self._next += lost + 1
                return Promise.LOST, lost
        self._next += 1
        return Promise.WRONG, 1

    def end(self, now: float) -> None:
        """The stream ended well."""
        self._end(now, "")
        if self._expected is not None:
            wanted = self._expected(self._next)
            if wanted is not None:
                text = f"it had {self.got} items, the next was to be {wanted!r}"
                self._violated(Promise.SHORT, text)

    def fail(self, now: float, code: str, message: str, *, allowed: bool) -> None:
        """The call ended in a typed error.

        Args:
            allowed: whether it may fail.
        """
        self._end(now, code)
        if not allowed:
            text = f"{code} after {self.got} items: {message}"
            self._violated(Promise.FAILED, text)

    def crash(self, now: float, message: str) -> None:
        """The call ended in what is no error of dynbus."""
        self._end(now, "untyped")
        self._violated(Promise.UNTYPED, message)

    def hang(self, now: float) -> None:
        """The call was given up: it had not ended long after its deadline."""
        self._ended = True
        self._checker.ends["hung"] += 1
        self._violated(Promise.HUNG, f"{self.got} items, the last {now - self._last:.1f} s ago")

    def _violated(self, promise: Promise, details: str, count: int = 1) -> None:
        # One item too many is followed by others: the first says what is wrong.
        is_first = promise not in self._broken
        self._broken.add(promise)
        self._checker.violated(promise, self._call, details, count=count, is_example=is_first)

    def _end(self, now: float, code: str) -> None:
        checker = self._checker
        checker.ends[code or "well"] += 1
        if self._ended:
            self._violated(Promise.AFTER_THE_END, f"a second end: {code or 'well'}")
        self._ended = True
        checker.stalls.gap(
            f"{self._call}, its end", self._last, now, self._pause, replays=self._replays
        )
        if self._deadline is not None and now > self._deadline + LATE:
            text = f"{now - self._deadline:.2f} s after it"
            self._violated(Promise.LATE, text)


class Checker:
    """All calls of a run.

    Attributes:
        calls: that began.
        items: that arrived.
        ends: of calls, by the code of their error, `well` without one.
        broken: how often each promise was not kept.
        examples: the first of those, in words; of each call one for each promise.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.items = 0
        self.ends: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self.examples: list[Violation] = []
        self.stalls = Stalls()

    def __repr__(self) -> str:
        return f"<Checker [{self.calls} calls | {sum(self.broken.values())} promises broken]>"

    @property
    def held(self) -> bool:
        """True if every promise was kept so far."""
        return not self.broken

    def begin(
        self,
        call: str,
        *,
        now: float,
        expected: Callable[[int], bytes | None] | None = None,
        pause: float = 0.0,
        timeout: float | None = None,
        replays: bool = False,
    ) -> CallCheck:
        """A call begins; see `CallCheck`."""
        self.calls += 1
        return CallCheck(
            self,
            call,
            expected=expected,
            pause=pause,
            now=now,
            timeout=timeout,
            replays=replays,
        )

    def violated(
        self,
        promise: Promise,
        call: str,
        details: str,
        *,
        count: int = 1,
        is_example: bool = True,
    ) -> None:
        """A promise was not kept, so many times at once."""
        self.broken[promise.value] += count
        if is_example and len(self.examples) < EXAMPLES:
            self.examples.append(Violation(promise, call, details))


def of_items(items: Sequence[bytes]) -> Callable[[int], bytes | None]:
    """The expectation of a stream that had these items before."""
    return lambda index: items[index] if index < len(items) else None


class Spread(msgspec.Struct, frozen=True):
    """The distribution of a number of durations, in seconds.

    Attributes:
        buckets: how many were at most so long, by the text of that length; the last is `more`.
    """

    count: int
    p50: float
    p99: float
    longest: float
    buckets: dict[str, int]


BUCKETS: Final = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


def spread(durations: Iterable[float]) -> Spread | None:
    """The percentiles, each one that was measured; None without durations."""
    ordered = sorted(durations)
    if not ordered:
        return None
    buckets = {f"{limit:g}": 0 for limit in BUCKETS} | {"more": 0}
    for each in ordered:
        fitting = next((limit for limit in BUCKETS if each <= limit), None)
        buckets["more" if fitting is None else f"{fitting:g}"] += 1

    def rank(share: float) -> float:
        return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3)

    return Spread(len(ordered), rank(0.5), rank(0.99), round(ordered[-1], 3), buckets)
