"""A fleet of mock engines and the scheduler of a router, in virtual time.

Requests arrive as the trace says, and `KvScheduler` decides for each, or lets it wait: the very
one that serves, with its candidates, charges, predictions and queue. What an instance stores and
removes reaches its index when the step has ended and the delay of events has passed; that a request
has its first or last token, when it has it.

Decode steps in which nothing else happens are taken many at once, as late as possible: when a
request comes to that instance, or the first of its requests ends, but of `QUIET_STEPS` at most.
Requests get their tokens at the same times as with single steps; only the events of blocks that
these steps fill and evict are told at the end of all of them.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dynbus import ConfigError, DynbusError, Overloaded
from dynbus.kvrouter import (
    AwarenessLevel,
    CacheAwareness,
    Decision,
    InstanceProfile,
    KvEvent,
    KvScheduler,
    Overlap,
    RadixIndex,
    Rank,
    RequestShape,
    RouterConfig,
    SchedulingRequest,
    encode_events,
    profiles,
)
from dynbus.llm.engine import EngineLoad
from dynbus.llm.engine.observing import engine_figures
from dynbus.llm.engine.runner import RequestTotals
from dynbus.llm.mock.engine import MockConfig, MockEngine, Output, StepResult
from dynbus.llm.mock.sequence import GrowingSequence, mix

from .trace import Trace, TraceRequest

EVENT_DELAY: Final = 0.005
"""Seconds from the end of a step to the moment when the router's index knows its events."""

_NEVER: Final = math.inf


@dataclass(slots=True, eq=False)
class ReplayedRequest:
    """The life of one request, in seconds of virtual time.

    Attributes:
        instance: its position in the fleet; -1 as long as it waits for one.
        cached_tokens: of its prompt, found in the cache when it was admitted.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    instance: int = -1
    first_token: float = math.nan
    last_token: float = math.nan
    cached_tokens: int = 0


@dataclass(slots=True, eq=False)
class ReplayResult:
    """The outcome of a replay.

    Attributes:
        requests: in the order of their arrival.
        intervals: seconds between two tokens of a request, and how often that was; both of
            shape [intervals].
        busy: seconds that each instance computed; shape [instances]. Those that only compute
            prompts come first.
        preempted: how often a request lost its blocks.
    """

    requests: list[ReplayedRequest]
    intervals: tuple[NDArray[np.float64], NDArray[np.int64]]
    busy: list[float]
    preempted: int


class SteppedEngine(Protocol):
    """An engine that a fleet drives in virtual time; see `MockEngine` for what it does."""

    @property
    def has_work(self) -> bool: ...
    @property
    def load(self) -> EngineLoad: ...
    def add_sequence(self, request_id: str, sequence: GrowingSequence, max_tokens: int) -> None: ...
    def advance_ended(self, now: float, until: float) -> StepResult | None: ...
    def quiet_until(self, now: float) -> float | None: ...
    def advance(self, now: float = 0.0, until: float | None = None) -> StepResult: ...


class PromptSequence:
    """The tokens of a request whose prompt is known by its hashes, and whose output by its number.

    The blocks of its output have hashes that no other request has.

    Args:
        number: of the request in its trace.
        sequence_hashes: of the complete blocks of its prompt.
    """

    def __init__(self, request: TraceRequest, number: int, sequence_hashes: Sequence[int]) -> None:
        self.length = request.prompt_tokens
        self.sequence_hashes = list(sequence_hashes)
        self.block_hashes: list[int] = request.block_hashes.tolist()
        self._salt = (number + 1) << 32

    def extend(self, count: int) -> list[int]:
        self.length += count
        return _NO_TOKENS

    def hash_to(self, blocks: int) -> None:
        for at in range(len(self.sequence_hashes), blocks):
            made = mix(self._salt + at)
            self.sequence_hashes.append(made)
            self.block_hashes.append(made)


_NO_TOKENS: Final[list[int]] = []


class Agenda:
    """The things that happen in virtual time, in their order, of all fleets that share it."""

    def __init__(self) -> None:
        # (time, number of the entry, what is done then)
        self._due: list[tuple[float, int, Callable[[float, int], None]]] = []
        self._entries = 0

    def at(self, time: float, what: Callable[[float, int], None]) -> int:
        """Have something done, with its time and its number, which is returned."""
        self._entries += 1
        heappush(self._due, (time, self._entries, what))
        return self._entries

    def advance(self, now: float) -> None:
        """Do what is due before `now`."""
        while self._due and self._due[0][0] < now:
            time, entry, what = heappop(self._due)
            what(time, entry)


class _Activity(Enum):
    IDLE = auto()
    STARTING = auto()
    """It has requests, and begins when all that arrive at this moment are there."""
    QUIET = auto()
    """It is in quiet steps, which are not taken yet."""
    STEP = auto()


@dataclass(slots=True, eq=False)
class FleetInstance:
    """An engine and where it stands.

    Attributes:
        number: its position in the fleet.
        activity: what its next entry in the agenda ends.
        began: when its step, or its quiet steps, began.
        result: of the step that it is in.
        wake: the number of the entry in the agenda that is valid; others are void.
        busy: seconds that it computed.
        totals, output_tokens: of its requests, as `EngineRunner` counts them.
    """

    number: int
    name: str
    engine: SteppedEngine
    activity: _Activity = _Activity.IDLE
    began: float = 0.0
    result: StepResult | None = None
    wake: int = 0
    busy: float = 0.0
    totals: RequestTotals = field(default_factory=RequestTotals)
    output_tokens: int = 0


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has arrived and has not ended.

    Attributes:
        number: of the request in its trace.
        decision: the number of the scheduler's decision; 0 as long as it waits for one.
        made: tokens of its output so far.
        instance: that has it; None as long as it waits for one.
        sent: when that got it.
        expected_reuse: tokens that the router takes to be cached there.
        first_here: when it had its first token there, behind `before` tokens from elsewhere.
    """

    request: TraceRequest
    number: int
    replayed: ReplayedRequest
    decision: int = 0
    made: int = 0
    instance: FleetInstance | None = None
    sent: float = 0.0
    expected_reuse: int = 0
    first_here: float = math.nan
    before: int = 0


class DelayedIndex:
    """The index of a router: a `Follower` that learns of events some time after they happened.

    Args:
        delay: see `EVENT_DELAY`.

    Attributes:
        sequence: messages that it has applied.
    """

    def __init__(self, delay: float) -> None:
        self.sequence = 0
        self._delay = delay
        self._index = RadixIndex()
        self._next_ids: Counter[str] = Counter()
        # (time from which on it is known, name of the instance, message)
        self._messages: deque[tuple[float, str, bytes]] = deque()

    def tell(self, name: str, events: Sequence[KvEvent], now: float) -> None:
        """An instance has stored and removed blocks."""
        message = encode_events(events, event_epoch=1, first_id=self._next_ids[name])
        self._next_ids[name] += len(events)
        self._messages.append((now + self._delay, name, message))

    def learn(self, now: float) -> None:
        """Take in what is known by now."""
        messages = self._messages
        while messages and messages[0][0] <= now:
            _, name, message = messages.popleft()
            self._index.apply(name, message)
            self.sequence += 1

    @property
    def position(self) -> DelayedIndex:
        return self

    def overlaps(self, block_hashes: NDArray[np.uint64]) -> dict[Rank, Overlap]:
        return self._index.overlaps(block_hashes)

    def awareness(self) -> CacheAwareness:
        return CacheAwareness(AwarenessLevel.EXACT)

    def ask_resync(self, rank: Rank, reason: str) -> None:
        """Engines of a fleet say what they hold: asked again they would say the same."""


class Fleet:
    """Simulates instances and their router on a trace.

    Args:
        names: of the instances.
        router: the settings of the router's scheduler.
        config: of each engine.
        event_delay: see `EVENT_DELAY`.
        seed: of what the router leaves to chance.
        make_engine: makes another engine of that configuration for each instance.
        agenda: that is shared with other fleets, which advance together.

    Instances can come and go while it is driven step by step: `arrive`, `advance`, `add`, `drain`
    and `kill`. Requests that come while there is none are held until one is there.

    Attributes:
        scheduler: the router's, to ask for its decisions and statistics.
        index: what the router follows; None where it guesses.
        agenda: its own unless it was given.

    Raises:
        ConfigError: the router's policy cannot be loaded.
    """

    def __init__(
        self,
        names: Sequence[str],
        router: RouterConfig,
        config: MockConfig,
        *,
        event_delay: float = EVENT_DELAY,
        seed: int = 0,
        make_engine: Callable[[MockConfig], SteppedEngine] = MockEngine,
        agenda: Agenda | None = None,
    ) -> None:
        self._config = config
        self._make_engine = make_engine
        self._instances: dict[str, FleetInstance] = {}
        self.index = DelayedIndex(event_delay) if router.exact else None
        self.scheduler = KvScheduler(router, follower=self.index, random=Random(seed))
        self._metadata = {
            profiles.BLOCK_SIZE_KEY: str(config.block_size),
            profiles.TOTAL_BLOCKS_KEY: str(config.blocks),
            profiles.MAX_BATCHED_TOKENS_KEY: str(config.max_num_batched_tokens),
            profiles.EVENTS_KEY: str(router.exact),
        }
        self._profiles: list[InstanceProfile] = []
        self.agenda = Agenda() if agenda is None else agenda
        self._requests: dict[str, OpenRequest] = {}
        self._held: list[OpenRequest] = []
        self._replayed: list[ReplayedRequest] = []
        self._block_size = config.block_size
        self._waiting = 0
        # Seconds between tokens, and how many requests had each.
        self._intervals: list[tuple[NDArray[np.float64] | tuple[float, ...], int]] = []
        self._preempted = 0
        for name in names:
            self.add(name, 0.0)

    def run(
        self, trace: Trace, *, speed: float = 1.0, progress: Callable[[int], None] | None = None
    ) -> ReplayResult:
        """Replay a trace, once.

        Args:
            speed: the trace passes so many times faster; the engines do not.
            progress: is told how many requests have arrived.

        Raises:
            ConfigError: the policy returns no costs, or leaves a request without an instance.
            RequestTooLong: a request does not fit into an engine.
        """
        for number, request in enumerate(trace.requests):
            self.arrive(request, request.arrival / speed)
            if progress is not None and number % 64 == 0:
                progress(number)
        return self.finish()

    # Step by step -------------------------------------------------------------------------

    def arrive(self, request: TraceRequest, now: float) -> ReplayedRequest:
        """A request comes; times never go back. Returns its life, which is filled in later."""
        self.advance(now)
        replayed = ReplayedRequest(now, request.prompt_tokens, request.output_tokens)
        opened = OpenRequest(request, len(self._replayed), replayed)
        self._replayed.append(replayed)
        self._requests[request.id] = opened
        self._submit(opened, now)
        return replayed

    def finish(self) -> ReplayResult:
        """The outcome, when all that is left has been carried out."""
        self.advance(_NEVER)
        durations, counts = zip(*(((), 0), *self._intervals), strict=True)
        repeated = np.repeat(counts, [len(each) for each in durations])
        return ReplayResult(
            self._replayed,
            (np.concatenate(durations), repeated),
            [instance.busy for instance in self._instances.values()],
            self._preempted,
        )

    def add(self, name: str, now: float) -> None:
        """An instance with an empty cache is there; held requests go to it."""
        self.advance(now)
        number = len(self._instances)
        self._instances[name] = FleetInstance(number, name, self._make_engine(self._config))
        self._profiles = [*self._profiles, profiles.read_profile(name, self._metadata)]
        self._changed(now)

    def drain(self, name: str, now: float) -> None:
        """An instance gets no further requests; what it has it finishes."""
        self.advance(now)
        self._profiles = [one for one in self._profiles if one.instance != name]
        self._changed(now)

    def kill(self, name: str, now: float) -> None:
        """An instance is gone; its requests go on elsewhere, behind the tokens that they have."""
        self.advance(now)
        self._profiles = [one for one in self._profiles if one.instance != name]
        instance = self._instances[name]
        if instance.activity is _Activity.QUIET:
            # What ended by now was told; the step that it is in was not.
            ended = instance.engine.advance_ended(instance.began, now)
            if ended is not None:
                instance.activity, instance.result = _Activity.STEP, ended
                instance.began += ended.duration
                self._end_steps(instance, instance.began)
        if instance.activity in (_Activity.QUIET, _Activity.STEP):
            instance.busy += now - instance.began
        # What is in the agenda for it is void.
        instance.wake, instance.activity, instance.result = -1, _Activity.IDLE, None
        self.scheduler.remove_instance(name)
        lost = [one for one in self._requests.values() if one.instance is instance]
        for opened in lost:
            self.scheduler.ended(opened.decision, now, "StreamLost")
            opened.replayed.instance, opened.decision, opened.instance = -1, 0, None
        for opened in lost:
            self._lost(opened, now)
        self._changed(now)

    def _lost(self, opened: OpenRequest, now: float) -> None:
        """The instance of a request is gone."""
        self._submit(opened, now)

    def load(self, name: str) -> EngineLoad:
        """The load of an instance between its last two steps."""
        return self._instances[name].engine.load

    def figures(self, name: str) -> dict[str, float]:
        """The figures that an instance tells of itself, as a real one does."""
        one = self._instances[name]
        return engine_figures(one.engine.load, self._config.limits, one.totals, one.output_tokens)

    @property
    def instances(self) -> int:
        """The number of instances that take requests."""
        return len(self._profiles)

    @property
    def held(self) -> int:
        """The requests that no instance has: there is none, or the router lets them wait."""
        return len(self._held) + self._waiting

    @property
    def is_busy(self) -> bool:
        """True if a request has not ended."""
        return bool(self._requests)

    def _changed(self, now: float) -> None:
        """Other instances are there now."""
        if not self._profiles:
            return
        held, self._held = self._held, []
        for opened in held:
            self._submit(opened, now)
        if self._waiting:
            self.scheduler.refresh(self._profiles)
            self._release(now)

    # The router ---------------------------------------------------------------------------

    def _submit(self, opened: OpenRequest, now: float) -> None:
        """Have the router decide for a request, or hold it where there is no instance."""
        if not self._profiles:
            self._held.append(opened)
            return
        request = opened.request
        shape = RequestShape(request.prompt_tokens, self._block_size, request.block_hashes)
        asked = SchedulingRequest(request.id, shape, self._profiles, arrived=now)
        if self.index is not None:
            self.index.learn(now)
        try:
            outcome = self.scheduler.submit(asked, now)
        except Overloaded as error:
            raise self._refusal(request.id, error) from None
        if isinstance(outcome, Decision):
            self._send(asked, outcome, now)
        else:
            self._waiting += 1

    def _release(self, now: float) -> None:
        """Send those that wait no longer."""
        if not self._waiting:
            return
        if self.index is not None:
            self.index.learn(now)
        for ticket, outcome in self.scheduler.release(now):
            self._waiting -= 1
            if isinstance(outcome, DynbusError):
                raise self._refusal(ticket.request.request_id, outcome)
            self._send(ticket.request, outcome, now)

    def _refusal(self, request_id: str, error: DynbusError) -> DynbusError:
        if not isinstance(error, Overloaded):
            return error
        if self.scheduler.statistics().refused:
            return ConfigError(f"request {request_id} finds the queue full: raise queue_limit")
        return ConfigError(
            f"policy {self.scheduler.policy} gives infinity to all {len(self._instances)} "
            f"instances for request {request_id}: one of them must get it"
        )

    def _send(self, asked: SchedulingRequest, decision: Decision, now: float) -> None:
        opened = self._requests[asked.request_id]
        opened.decision, opened.expected_reuse = decision.number, decision.expected_reuse
        request, instance = opened.request, self._instances[decision.chosen.instance]
        opened.replayed.instance, opened.instance = instance.number, instance
        opened.sent, opened.before = now, opened.made
        instance.totals.submitted += 1
        sequence = PromptSequence(request, opened.number, asked.shape.sequence_hashes)
        if opened.made:
            sequence.extend(opened.made)
        self._disturb(instance, now)
        self._add(instance, sequence, opened)

    # The engines --------------------------------------------------------------------------

    def _add(self, instance: FleetInstance, sequence: PromptSequence, opened: OpenRequest) -> None:
        """Give a request to its engine."""
        request = opened.request
        instance.engine.add_sequence(request.id, sequence, request.output_tokens - opened.made)

    def _disturb(self, instance: FleetInstance, now: float) -> None:
        """Have an engine that gets something to do begin with it as soon as it can."""
        if instance.activity is _Activity.QUIET:
            # The quiet steps that begin later will not be quiet.
            instance.result = instance.engine.advance(instance.began, now)
            instance.activity = _Activity.STEP
            self._wake_at(instance.began + instance.result.duration, instance)
        elif instance.activity is _Activity.IDLE:
            instance.activity = _Activity.STARTING
            self._wake_at(now, instance)

    def _wake_at(self, time: float, instance: FleetInstance) -> None:
        instance.wake = self.agenda.at(time, partial(self._wake, instance))

    def advance(self, now: float) -> None:
        """Carry out what ends before `now`."""
        self.agenda.advance(now)

    def _wake(self, instance: FleetInstance, now: float, entry: int) -> None:
        if entry == instance.wake:
            self._end_steps(instance, now)
            # Between two steps: what is sent to it now is in the one that begins.
            instance.activity = _Activity.IDLE
            self._release(now)
            self._begin_steps(instance, now)

    def _begin_steps(self, instance: FleetInstance, now: float) -> None:
        engine = instance.engine
        instance.began = now
        if not engine.has_work:
            instance.activity = _Activity.IDLE
            return
        end = engine.quiet_until(now)
        if end is None:
            instance.activity = _Activity.STEP
            instance.result = engine.advance(now)
            end = now + instance.result.duration
        else:
            instance.activity = _Activity.QUIET
        self._wake_at(end, instance)

    def _end_steps(self, instance: FleetInstance, now: float) -> None:
        if instance.activity is _Activity.QUIET:
            instance.result = instance.engine.advance(instance.began, _NEVER)
        result, instance.result = instance.result, None
        if result is not None:
            self._note_steps(instance, result, now)

    def _note_steps(self, instance: FleetInstance, result: StepResult, now: float) -> None:
        """Take in what steps have made."""
        instance.busy += result.duration
        self._preempted += result.preempted
        if result.decoding:
            self._intervals.append((result.durations, result.decoding))
        for output in result.outputs:
            self._note(output, now)
        if result.events and self.index is not None:
            self.index.tell(instance.name, result.events, now)

    def _note(self, output: Output, now: float) -> None:
        opened = self._requests[output.request_id]
        if output.is_first:
            self._note_first(opened, output.cached_tokens, now)
        elif output.resumes:
            self._note_gap(opened, now)
        self._note_tokens(opened, output.count, now)
        if output.finish_reason is not None:
            self._note_end(opened, now)

    def _note_first(self, opened: OpenRequest, cached_tokens: int, now: float) -> None:
        """A request has its first token of its instance."""
        assert opened.instance is not None, "a token is of an instance"
        totals = opened.instance.totals
        totals.firsts += 1
        totals.first_seconds += now - opened.sent
        opened.first_here = now
        if opened.made:
            # It went on elsewhere.
            self._note_gap(opened, now)
        else:
            opened.replayed.first_token = now + self._config.latency
            opened.replayed.cached_tokens = cached_tokens
        self.scheduler.first_item(opened.decision, now)
        self.scheduler.note_reused(opened.decision, cached_tokens, now)

    def _note_gap(self, opened: OpenRequest, now: float) -> None:
        """The time since the token before is none of a step."""
        seen = now + self._config.latency
        self._intervals.append(((seen - opened.replayed.last_token,), 1))

    def _note_tokens(self, opened: OpenRequest, count: int, now: float) -> None:
        assert opened.instance is not None, "a token is of an instance"
        opened.instance.output_tokens += count
        opened.replayed.last_token = now + self._config.latency
        opened.made += count
        if self.scheduler.config.track_output:
            self.scheduler.grown(opened.decision, opened.made)

    def _note_end(self, opened: OpenRequest, now: float) -> None:
        assert opened.instance is not None, "a token is of an instance"
        del self._requests[opened.request.id]
        totals = opened.instance.totals
        totals.ended += 1
        totals.decoded_tokens += opened.made - opened.before - 1
        totals.decode_seconds += now - opened.first_here
        self.scheduler.ended(opened.decision, now)
