"""A handler in virtual time behind an `Admission`: what becomes of calls that just come."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from dynbus.bus.serving.admission import Admission, Admittance

REFUSED: Final = ("full", "late", "displaced")


@dataclass(eq=False)
class Call:
    """A call, and what became of it.

    Attributes:
        outcome: `done`, `cut`, `expired`, `full`, `late` or `displaced`; empty while it is open.
    """

    client: str
    arrived: float
    deadline: float
    outcome: str = ""
    began: float = math.nan
    ended: float = math.nan


class Load(NamedTuple):
    """What came of calls that came for a while.

    Attributes:
        done_per_second: calls that were done meanwhile.
        outcomes: how many of those that came meanwhile ended how, so far.
    """

    done_per_second: float
    outcomes: Counter[str]


@dataclass
class VirtualHandler:
    """Runs calls for so many seconds each, cuts them at their deadlines, refuses as it is told.

    Attributes:
        seconds: how long a call takes that begins at a time.
    """

    seconds: Callable[[float], float]
    concurrency: int = 8
    queue: int | None = 1024
    now: float = 0.0
    calls: list[Call] = field(default_factory=list[Call])

    def __post_init__(self) -> None:
        self.admission: Admission[Call] = Admission(self.concurrency, self.queue)
        self._events: list[tuple[float, int, Call, str]] = []

    def arrive(self, allowed: float = math.inf, client: str = "c") -> Call:
        """A call comes now, with so many seconds to its deadline."""
        call = Call(client, self.now, self.now + allowed)
        self.calls.append(call)
        verdict, displaced = self.admission.enter(
            call, client, self.now, None if math.isinf(allowed) else call.deadline
        )
        if displaced is not None:
            displaced.outcome = "displaced"
        if verdict is Admittance.RUN:
            self._begin(call)
        elif verdict is Admittance.WAIT:
            self._at(call.deadline, call, "expired")
        else:
            call.outcome = verdict.value
        return call

    def load(
        self,
        per_second: float,
        seconds: float,
        *,
        allowed: float,
        clients: int = 1,
        chance: Random | None = None,
    ) -> Load:
        """Calls come for so many seconds, evenly or by chance."""
        first, begun = len(self.calls), self.now
        end = self.now + seconds
        while True:
            pause = 1 / per_second if chance is None else chance.expovariate(per_second)
            if self.now + pause > end:
                self.pass_to(end)
                done = sum(begun < call.ended and call.outcome == "done" for call in self.calls)
                return Load(done / seconds, outcomes(self.calls[first:]))
            self.pass_to(self.now + pause)
            self.arrive(allowed, f"c{len(self.calls) % clients}")

    def pass_to(self, until: float) -> None:
        """Let time pass."""
        while self._events and self._events[0][0] <= until:
            self.now, _, call, outcome = heapq.heappop(self._events)
            if outcome == "expired":
                if self.admission.withdraw(call):
                    call.outcome = outcome
                continue
            call.outcome, call.ended = outcome, self.now
            turn = self.admission.leave(call, self.now, whole=outcome == "done")
            for late in turn.late:
                late.outcome = "late"
            if turn.begins is not None:
                self._begin(turn.begins)
        self.now = until

    def taken_after(self, allowed: float, client: str = "c", *, step: float) -> float:
        """Seconds until a call would be taken when no other comes, to the next `step`."""
        begun = self.now
        while True:
            self.pass_to(self.now + step)
            verdict, displaced = self.admission.enter(
                probe := Call(client, self.now, self.now + allowed),
                client,
                self.now,
                None if math.isinf(allowed) else probe.deadline,
            )
            assert displaced is None
            if verdict in (Admittance.RUN, Admittance.WAIT):
                return self.now - begun

    def _begin(self, call: Call) -> None:
        call.began = self.now
        ends = self.now + self.seconds(self.now)
        if ends <= call.deadline:
            self._at(ends, call, "done")
        else:
            self._at(call.deadline, call, "cut")

    def _at(self, time: float, call: Call, outcome: str) -> None:
        if not math.isinf(time):
            heapq.heappush(self._events, (time, id(call), call, outcome))


def outcomes(calls: list[Call]) -> Counter[str]:
    """How many calls ended how."""
    return Counter(call.outcome for call in calls)
