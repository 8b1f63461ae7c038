"""A trace on a fleet whose instances come and go as an autoscaler says, with faults, in virtual
time.

The place of the orchestrator is taken by a simple one: it starts what is missing in each pool, each
instance a cold start later, drains what is too much, the newest first, and replaces what dies.
Instances are paid for from their start to their end, whether they serve or not. What the autoscaler
sees is reckoned from what instances say of themselves, by the code that does it on the bus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from dynbus.llm.scaling import Observation, PoolCounts, PoolLoad, PoolState, PoolTarget

from .apart import ApartSimulation
from .fleet import Fleet, ReplayedRequest, ReplayResult
from .report import Objective
from .simulation import Simulation
from .trace import Trace

MOST_SECONDS: Final = 7 * 86_400.0
"""Virtual time after which requests that have not ended never will."""

Decide = Callable[[Observation], Mapping[str, PoolTarget]]
"""The decision of an autoscaler about all pools."""


class Fault(NamedTuple):
    """Something that goes wrong, or is done by hand.

    Attributes:
        kind: `lost` has no metrics to show for `seconds`, and `stuck` has what is started within
            them never serve; `dies` ends `instance`, the oldest one where that is empty; `hand` has
            another one set the number of instances to `instances`.
        at: seconds after the first arrival.
        cold_start: seconds until what is started by `hand` serves; None for that of the fleet.
        pool: in which; empty for the one that requests go to.
    """

    kind: Literal["lost", "stuck", "dies", "hand"]
    at: float
    seconds: float = 0.0
    instances: int = 0
    instance: str = ""
    cold_start: float | None = None
    pool: str = ""


class Sample(NamedTuple):
    """The state of a pool at a decision.

    Attributes:
        running: requests in engines, before it.
        context_tokens: of those.
        is_lost: whether the metrics were missing.
        target: the decision.
        set_to: the instances that the orchestrator is set to after it.
        turned_away: prompts since the sample before, as they were told.
    """

    pool: str
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
    turned_away: int = 0


@dataclass(slots=True)
class ScaledResult:
    """The outcome of a replay on a fleet that was scaled.

    Attributes:
        replay: of the engines and their requests.
        samples: of each decision, one for each pool.
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

    def changes(self, pool: str) -> int:
        """The number of times that the target of a pool was another one."""
        targets = [sample.target.desired for sample in self.samples if sample.pool == pool]
        return sum(before != after for before, after in pairwise(targets))

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
    """An instance of a pool.

    Attributes:
        ready_at: when it serves; infinite for one that never will.
        state: `gone` are those that are not paid for any longer.
    """

    name: str
    began: float
    ready_at: float
    state: Literal["starting", "ready", "draining", "gone"] = "starting"


class _Pool:
    """A pool and its orchestrator.

    Args:
        at: has something done at a time.
        faults: of this pool.
        cold_start: seconds from the start of an instance until it serves.
        first: instances at the beginning.
        names: of the first instances, as far as they have one.

    Attributes:
        set_to: instances that it is to have.
        paid: seconds of instances that are gone.
    """

    def __init__(
        self,
        fleet: Fleet,
        first: int,
        at: Callable[[float, Callable[[float], None]], None],
        faults: Sequence[Fault],
        cold_start: float,
        names: Sequence[str],
    ) -> None:
        self.set_to = self._asked = first
        self.paid = 0.0
        self._fleet = fleet
        self._at = at
        self._faults = faults
        self._cold_start = cold_start
        self._names = names
        self._members: list[_Member] = []
        self._made = 0
        self._counts = PoolCounts()

    # The orchestrator ---------------------------------------------------------------------

    def of(self, *states: str) -> list[_Member]:
        """The instances in these states."""
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

    def set(self, count: int, now: float, *, cold_start: float | None = None) -> None:
        """Have so many instances from now on."""
        self.set_to = count
        self._carry_out(now, cold_start)

    def _carry_out(self, now: float, cold_start: float | None = None) -> None:
        """Start what is missing, and let go of what is too much: first what does not serve yet."""
        there = self.of("ready", "starting")
        for _ in range(len(there), self.set_to):
            self._start(now, self._cold_start if cold_start is None else cold_start)
        surplus = len(there) - self.set_to
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
        self.paid += now - member.began

    def die(self, name: str, now: float) -> bool:
        """End an instance that serves, the oldest for an empty name; False where there is none."""
        ready = [one for one in self.of("ready") if not name or one.name == name]
        if ready:
            self._end(ready[0], now)
            self._carry_out(now)
        return bool(ready)

    def paid_until(self, now: float) -> float:
        """Seconds of all instances."""
        return self.paid + sum(now - one.began for one in self._members if one.state != "gone")

    # What the autoscaler sees of it, and wants ---------------------------------------------

    def state(self, now: float) -> tuple[PoolState, PoolLoad]:
        """The pool as it shows itself now, and its load even if it does not say it."""
        for member in self.of("draining"):
            left = self._fleet.load(member.name)
            if not left.running + left.waiting:
                self._end(member, now)
        ready = [one.name for one in self.of("ready")]
        draining = [one.name for one in self.of("draining")]
        figures = {name: self._fleet.figures(name) for name in (*ready, *draining)}
        load = self._load(figures.values())
        if self._is_within("lost", now):
            # One that does not answer is enough.
            figures = {name: said for name, said in figures.items() if name not in ready[:1]}
        return self._counts.state(ready, draining, figures, self._fleet.held), load

    def _load(self, figures: Collection[Mapping[str, float]]) -> PoolLoad:
        def total(name: str) -> int:
            return int(sum(said[name] for said in figures))

        blocks = sum(said["block_size"] * said["kv_blocks_used"] for said in figures)
        return PoolLoad(self._fleet.held + total("waiting"), total("running"), blocks)

    def ask(self, target: PoolTarget, now: float) -> None:
        """Have a target of the autoscaler carried out, if it is another one than before."""
        if target.desired != self._asked:
            self._asked = target.desired
            self.set(target.desired, now)


class ScaledFleet:
    """Replays one trace, once, on a fleet that is scaled.

    Args:
        simulation: the pools at the beginning, where all instances serve, and their router.
        policy: of the router, by its name.
        decide: the autoscaler; None for faults alone, and no samples.
        cold_start: seconds from the start of an instance until it serves.
        interval: seconds between two decisions.
        first: another number of instances at the beginning, by the pool.
        names: of those of the pool that requests go to, as far as they have one.
    """

    def __init__(
        self,
        simulation: Simulation | ApartSimulation,
        policy: str,
        decide: Decide | None,
        *,
        cold_start: float,
        interval: float = 1.0,
        faults: Sequence[Fault] = (),
        first: Mapping[str, int] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self._speed = simulation.speed
        self._decide = decide
        self._interval = interval
        self._faults = faults
        counts = simulation.counts if first is None else first
        fleets = simulation.fleets(policy)
        # (time, number, what is done then)
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._entries = 0
        *_, (self._front, self._fleet) = fleets.items()
        self._pools = {
            name: _Pool(
                fleet,
                counts[name],
                self._at,
                [fault for fault in faults if (fault.pool or self._front) == name],
                cold_start,
                names if name == self._front else (),
            )
            for name, fleet in fleets.items()
        }
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
        self._begin()
        fleet, result = self._fleet, self._result
        began = trace.requests[0].arrival
        for number, request in enumerate(trace.requests):
            if progress is not None and number % 64 == 0:
                progress(number)
            now = (request.arrival - began) / self._speed
            self._until(now)
            fleet.arrive(request, now)
        last = ends = (trace.requests[-1].arrival - began) / self._speed
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
        result.instance_seconds = sum(pool.paid_until(ends) for pool in self._pools.values())
        return result

    def _begin(self) -> None:
        for pool in self._pools.values():
            pool.set(pool.set_to, 0.0, cold_start=0.0)
        for fault in self._faults:
            pool = self._pools[fault.pool or self._front]
            if fault.kind == "dies":
                self._at(fault.at, partial(self._die, pool, fault))
            elif fault.kind == "hand":
                self._at(fault.at, partial(pool.set, fault.instances, cold_start=fault.cold_start))
        if self._decide is not None:
            self._at(self._interval, partial(self._look, self._decide))

    def _die(self, pool: _Pool, fault: Fault, now: float) -> None:
        if not (self._fleet.is_busy and pool.of("ready")):
            self._result.missed.append(fault)
        pool.die(fault.instance, now)

    # Time ---------------------------------------------------------------------------------

    def _at(self, time: float, what: Callable[[float], None]) -> None:
        self._entries += 1
        heappush(self._agenda, (time, self._entries, what))

    def _until(self, now: float) -> None:
        while self._agenda and self._agenda[0][0] <= now:
            time, _, what = heappop(self._agenda)
            self._fleet.advance(time)
            what(time)

    # The autoscaler -------------------------------------------------------------------------

    def _look(self, decide: Decide, now: float) -> None:
        """Show the autoscaler what is there, and do what it wants."""
        seen = {name: pool.state(now) for name, pool in self._pools.items()}
        targets = decide(Observation(now, {name: state for name, (state, _) in seen.items()}))
        for name, (state, load) in seen.items():
            pool, target = self._pools[name], targets[name]
            pool.ask(target, now)
            self._result.samples.append(
                Sample(
                    *(name, now, state.ready, len(pool.of("starting")), state.draining),
                    *(load.running, load.waiting, round(load.context_tokens)),
                    *(state.load is None, target, pool.set_to),
                    0 if state.load is None else state.load.turned_away,
                )
            )
        self._at(now + self._interval, partial(self._look, decide))
