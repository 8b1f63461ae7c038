"""A trace on a fleet whose instances come and go as an autoscaler says, with faults, in virtual
time.

The place of the orchestrator is taken by a simple one: it starts what is missing, each instance a
cold start later, drains what is too much, the newest first, and replaces what dies. Instances are
paid for from their start to their end, whether they serve or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Final, Literal, NamedTuple

from dynbus.llm.scaling import Observation, PoolLoad, PoolState, PoolTarget

from .fleet import Fleet, ReplayedRequest, ReplayResult, Totals
from .report import Objective
from .simulation import Simulation
from .trace import Trace

MOST_SECONDS: Final = 7 * 86_400.0
"""Virtual time after which requests that have not ended never will."""
POOL: Final = "fleet"
"""The name of the one pool."""

Decide = Callable[[Observation], PoolTarget]
"""The decision of an autoscaler about the one pool."""


class Fault(NamedTuple):
    """Something that goes wrong, or is done by hand.

    Attributes:
        kind: `lost` has no metrics to show for `seconds`, and `stuck` has what is started within
            them never serve; `dies` ends `instance`, the oldest one where that is empty; `hand` has
            another one set the number of instances to `instances`.
        at: seconds after the first arrival.
        cold_start: seconds until what is started by `hand` serves; None for that of the fleet.
    """

    kind: Literal["lost", "stuck", "dies", "hand"]
    at: float
    seconds: float = 0.0
    instances: int = 0
    instance: str = ""
    cold_start: float | None = None


class Sample(NamedTuple):
    """The state of the fleet at a decision.

    Attributes:
        running: requests in engines, before it.
        context_tokens: of those.
        is_lost: whether the metrics were missing.
        target: the decision.
        set_to: the instances that the orchestrator is set to after it.
    """

    time: float
    ready: int
    starting: int
    draining: int
    running: int
    waiting: int
    context_tokens: int
    is_lost: bool
    target: PoolTarget
    set_to: int


@dataclass(slots=True)
class ScaledResult:
    """The outcome of a replay on a fleet that was scaled.

    Attributes:
        replay: of the engines and their requests.
        samples: of each decision.
        instance_seconds: that were paid for.
        missed: faults that ended no instance, since none served then.
    """

    replay: ReplayResult = field(init=False)
    samples: list[Sample] = field(default_factory=list[Sample])
    instance_seconds: float = 0.0
    missed: list[Fault] = field(default_factory=list["Fault"])

    @property
    def requests(self) -> list[ReplayedRequest]:
        """In the order of their arrival."""
        return self.replay.requests

    def goodput(self, objective: Objective) -> float:
        """The share of requests that kept an objective."""
        return sum(is_good(request, objective) for request in self.requests) / len(self.requests)


def is_good(request: ReplayedRequest, objective: Objective) -> bool:
    """True if a request kept an objective."""
    first = request.first_token - request.arrival
    between = (request.last_token - request.first_token) / max(1, request.output_tokens - 1)
    return first <= objective.ttft and between <= objective.itl


def _unserved(fleet: Fleet) -> ValueError:
    return ValueError(
        f"{fleet.held} requests wait for an instance, and none comes: scale the fleet to more than "
        "0 after they came"
    )


@dataclass(slots=True, eq=False)
class _Member:
    """An instance of the fleet.

    Attributes:
        ready_at: when it serves; infinite for one that never will.
        state: `gone` are those that are not paid for any longer.
    """

    name: str
    began: float
    ready_at: float
    state: Literal["starting", "ready", "draining", "gone"] = "starting"


class ScaledFleet:
    """Replays one trace, once, on a fleet that is scaled.

    Args:
        simulation: the fleet at the beginning, where all instances serve, and its router.
        policy: of the router, by its name.
        decide: the autoscaler; None for faults alone, and no samples.
        cold_start: seconds from the start of an instance until it serves.
        interval: seconds between two decisions.
        first: another number of instances at the beginning.
        names: of those, as far as they have one.
    """

    def __init__(
        self,
        simulation: Simulation,
        policy: str,
        decide: Decide | None,
        *,
        cold_start: float,
        interval: float = 1.0,
        faults: Sequence[Fault] = (),
        first: int | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self._simulation = simulation
        self._decide = decide
        self._cold_start = cold_start
        self._interval = interval
        self._faults = faults
        self._names = names
        self._count = count = simulation.instances if first is None else first
        self._set_to = count
        self._asked = count
        self._fleet = Fleet(
            [],
            simulation.config(policy),
            simulation.engine,
            event_delay=simulation.event_delay,
            seed=simulation.seed,
        )
        self._members: list[_Member] = []
        self._made = 0
        # (time, number, what is done then)
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._entries = 0
        self._before = Totals()
        self._result = ScaledResult()

    def run(
        self,
        trace: Trace,
        *,
        idle: float = 0.0,
        progress: Callable[[int], None] | None = None,
    ) -> ScaledResult:
        """Replay the trace, and go on deciding for `idle` seconds after its last token.

        Args:
            progress: is told how many requests have arrived.

        Raises:
            ValueError: requests wait that nothing will ever serve.
        """
        for _ in range(self._count):
            self._start(0.0, 0.0)
        self._carry_out(0.0)
        for fault in self._faults:
            if fault.kind == "dies":
                self._at(fault.at, partial(self._die, fault))
            elif fault.kind == "hand":
                by_hand = partial(self._set, fault.instances, cold_start=fault.cold_start)
                self._at(fault.at, by_hand)
        if self._decide is not None:
            self._at(self._interval, partial(self._look, self._decide))
        fleet, result = self._fleet, self._result
        began = trace.requests[0].arrival
        for number, request in enumerate(trace.requests):
            if progress is not None and number % 64 == 0:
                progress(number)
            now = (request.arrival - began) / self._simulation.speed
            self._until(now)
            fleet.arrive(request, now)
        last = ends = (trace.requests[-1].arrival - began) / self._simulation.speed
        self._until(ends)
        if self._decide is None:
            self._until(math.inf)
        while fleet.is_busy and self._decide is not None:
            if ends > last + MOST_SECONDS:
                raise _unserved(fleet)
            ends += self._interval
            self._until(ends)
        ends += idle
        self._until(ends)
        result.replay = fleet.finish()
        if fleet.is_busy:
            raise _unserved(fleet)
        result.instance_seconds += sum(
            ends - member.began for member in self._members if member.state != "gone"
        )
        return result

    # Time ---------------------------------------------------------------------------------

    def _at(self, time: float, what: Callable[[float], None]) -> None:
        self._entries += 1
        heappush(self._agenda, (time, self._entries, what))

    def _until(self, now: float) -> None:
        while self._agenda and self._agenda[0][0] <= now:
            time, _, what = heappop(self._agenda)
            self._fleet.advance(time)
            what(time)

    # The orchestrator -----------------------------------------------------------------------

    def _of(self, *states: str) -> list[_Member]:
        return [member for member in self._members if member.state in states]

    def _is_within(self, kind: str, now: float) -> bool:
        return any(
            fault.kind == kind and fault.at <= now < fault.at + fault.seconds
            for fault in self._faults
        )

    def _start(self, now: float, cold_start: float) -> None:
        self._made += 1
        is_stuck = self._is_within("stuck", now)
        ready_at = math.inf if is_stuck else now + cold_start
        named = self._names[self._made - 1 : self._made]
        name = named[0] if named else f"engine-{self._made}"
        member = _Member(name, now, ready_at)
        self._members.append(member)
        if not is_stuck:
            self._at(ready_at, partial(self._serve, member))

    def _serve(self, member: _Member, now: float) -> None:
        if member.state == "starting":
            member.state = "ready"
            self._fleet.add(member.name, now)

    def _set(self, count: int, now: float, *, cold_start: float | None = None) -> None:
        self._set_to = count
        self._carry_out(now, cold_start)

    def _carry_out(self, now: float, cold_start: float | None = None) -> None:
        """Start what is missing, and let go of what is too much: first what does not serve yet."""
        there = self._of("ready", "starting")
        for _ in range(len(there), self._set_to):
            self._start(now, self._cold_start if cold_start is None else cold_start)
        surplus = len(there) - self._set_to
        if surplus > 0:
            newest = sorted(there, key=lambda one: (one.state == "starting", one.began))
            for member in newest[-surplus:]:
                if member.state == "starting":
                    self._end(member, now)
                else:
                    member.state = "draining"
                    self._fleet.drain(member.name, now)

    def _end(self, member: _Member, now: float) -> None:
        if member.state != "starting":
            self._fleet.kill(member.name, now)
        member.state = "gone"
        self._result.instance_seconds += now - member.began

    def _die(self, fault: Fault, now: float) -> None:
        named = fault.instance
        ready = [one for one in self._of("ready") if not named or one.name == named]
        if not (ready and self._fleet.is_busy):
            self._result.missed.append(fault)
        if ready:
            self._end(ready[0], now)
            self._carry_out(now)

    # The autoscaler -------------------------------------------------------------------------

    def _look(self, decide: Decide, now: float) -> None:
        """Show the autoscaler what is there, and do what it wants."""
        for member in self._of("draining"):
            left = self._fleet.load(member.name)
            if not left.running + left.waiting:
                self._end(member, now)
        load, is_lost = self._load(), self._is_within("lost", now)
        ready, draining = len(self._of("ready")), len(self._of("draining"))
        state = PoolState(ready, draining, None if is_lost else load)
        target = decide(Observation(now, {POOL: state}))
        if target.desired != self._asked:
            self._asked = target.desired
            self._set(target.desired, now)
        self._result.samples.append(
            Sample(
                *(now, ready, len(self._of("starting")), draining, load.running, load.waiting),
                *(round(load.context_tokens), is_lost, target, self._set_to),
            )
        )
        self._at(now + self._interval, partial(self._look, decide))

    def _load(self) -> PoolLoad:
        fleet, engine = self._fleet, self._simulation.engine
        loads = [fleet.load(member.name) for member in self._of("ready", "draining")]
        totals, before = fleet.totals, self._before
        self._before = Totals(**{name: getattr(totals, name) for name in Totals.__slots__})
        firsts, decoded = totals.firsts - before.firsts, totals.decoded - before.decoded
        return PoolLoad(
            waiting=fleet.held + sum(load.waiting for load in loads),
            running=sum(load.running for load in loads),
            context_tokens=engine.block_size * sum(load.active_blocks for load in loads),
            capacity_tokens=engine.capacity_tokens,
            slots=engine.max_num_seqs,
            arrivals=totals.arrivals - before.arrivals,
            ended=totals.ended - before.ended,
            prompt_tokens=totals.prompt_tokens - before.prompt_tokens,
            output_tokens=totals.output_tokens - before.output_tokens,
            firsts=firsts,
            ttft=(totals.waited - before.waited) / firsts if firsts else None,
            itl=(totals.decoding - before.decoding) / decoded if decoded else None,
        )
