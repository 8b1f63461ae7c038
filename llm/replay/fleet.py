"""A fleet of mock engines and a router, in virtual time.

Requests arrive as the trace says; the policy sends each to an instance at once. What an instance
stores and removes reaches the router's index when its step has ended and the delay of events has
passed; that a request has its first or last token, when it has it.

Decode steps in which nothing else happens are taken many at once, as late as possible: when a
request comes to that instance, or the first of its requests ends, but of `QUIET_STEPS` at most.
Requests get their tokens at the same times as with single steps; only the events of blocks that
these steps fill and evict are told at the end of all of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.events import encode_events
from dynbus.kvrouter.routing.cost import RequestShape
from dynbus.llm.mock.engine import EngineConfig, MockEngine, Output, StepResult
from dynbus.llm.mock.sequence import mix

from .policies import Policy
from .trace import Trace, TraceRequest

EVENT_DELAY: Final = 0.005
"""Seconds from the end of a step to the moment when the router's index knows its events."""

_NEVER: Final = math.inf


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What happened to one request, in seconds of virtual time.

    Attributes:
        instance: its position in the fleet.
        cached_tokens: of its prompt, found in the cache when it was admitted.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    instance: int
    first_token: float = math.nan
    last_token: float = math.nan
    cached_tokens: int = 0


@dataclass(slots=True, eq=False)
class Outcome:
    """What happened in a replay.

    Attributes:
        records: of the requests, in the order of their arrival.
        intervals: seconds between two tokens of a request, and how often that was; both of
            shape [intervals].
        busy: seconds that each instance computed; shape [instances].
        preempted: how often a request lost its blocks.
    """

    records: list[RequestRecord]
    intervals: tuple[NDArray[np.float64], NDArray[np.int64]]
    busy: list[float]
    preempted: int


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


class _Activity(Enum):
    IDLE = auto()
    STARTING = auto()
    """It has requests, and begins when all that arrive at this moment are there."""
    QUIET = auto()
    """It is in quiet steps, which are not taken yet."""
    STEP = auto()


@dataclass(slots=True, eq=False)
class _Instance:
    """An engine and where it stands.

    Attributes:
        number: its position in the fleet.
        activity: what its next entry in the agenda ends.
        began: when its step, or its quiet steps, began.
        result: of the step that it is in.
        wake: the number of the entry in the agenda that is valid; others are void.
        next_event: the id of its next event.
        busy: seconds that it computed.
    """

    number: int
    name: str
    engine: MockEngine
    activity: _Activity = _Activity.IDLE
    began: float = 0.0
    result: StepResult | None = None
    wake: int = 0
    next_event: int = 0
    busy: float = 0.0


@dataclass(slots=True)
class _Intervals:
    durations: list[NDArray[np.float64] | tuple[float, ...]] = field(
        default_factory=list[NDArray[np.float64] | tuple[float, ...]]
    )
    counts: list[int] = field(default_factory=list[int])

    def add(self, durations: NDArray[np.float64] | tuple[float, ...], count: int) -> None:
        self.durations.append(durations)
        self.counts.append(count)

    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        if not self.durations:
            return np.empty(0), np.empty(0, dtype=np.int64)
        lengths = [len(each) for each in self.durations]
        return np.concatenate(self.durations), np.repeat(np.array(self.counts), lengths)


class Fleet:
    """Simulates instances and their router on a trace.

    Args:
        policy: chooses among `len(names)` instances.
        event_delay: see `EVENT_DELAY`.
    """

    def __init__(
        self,
        names: list[str],
        policy: Policy,
        config: EngineConfig,
        *,
        event_delay: float = EVENT_DELAY,
    ) -> None:
        self._policy = policy
        self._config = config
        self._event_delay = event_delay
        self._instances = [
            _Instance(number, name, MockEngine(config)) for number, name in enumerate(names)
        ]
        # (time, number of the entry, instance)
        self._agenda: list[tuple[float, int, _Instance]] = []
        self._entries = 0
        # (time at which the router knows them, name of the instance, message)
        self._events: deque[tuple[float, str, bytes]] = deque()
        self._records: dict[str, RequestRecord] = {}
        self._intervals = _Intervals()
        self._preempted = 0

    def run(
        self, trace: Trace, *, speed: float = 1.0, progress: Callable[[int], None] | None = None
    ) -> Outcome:
        """Replay a trace, once.

        Args:
            speed: the trace passes so many times faster; the engines do not.
            progress: is told how many requests have arrived.

        Raises:
            RequestTooLong: a request does not fit into an engine.
        """
        for number, request in enumerate(trace.requests):
            now = request.arrival / speed
            self._advance(now)
            self._tell_events(now)
            shape = RequestShape(request.prompt_tokens, trace.block_size, request.block_hashes)
            hashes: list[int] = request.sequence_hashes.tolist()
            chosen = self._policy.choose(request.id, shape, hashes)
            instance = self._instances[chosen]
            self._records[request.id] = RequestRecord(
                now, request.prompt_tokens, request.output_tokens, chosen
            )
            self._deliver(instance, PromptSequence(request, number, hashes), request, now)
            if progress is not None and number % 64 == 0:
                progress(number)
        self._advance(_NEVER)
        return Outcome(
            list(self._records.values()),
            self._intervals.arrays(),
            [instance.busy for instance in self._instances],
            self._preempted,
        )

    def _deliver(
        self, instance: _Instance, sequence: PromptSequence, request: TraceRequest, now: float
    ) -> None:
        if instance.activity is _Activity.QUIET:
            # The quiet steps that begin later will not be quiet.
            instance.result = instance.engine.step(instance.began, now)
            instance.activity = _Activity.STEP
            self._wake_at(instance.began + instance.result.duration, instance)
        elif instance.activity is _Activity.IDLE:
            instance.activity = _Activity.STARTING
            self._wake_at(now, instance)
        instance.engine.add_sequence(request.id, sequence, request.output_tokens)

    def _wake_at(self, time: float, instance: _Instance) -> None:
        self._entries += 1
        instance.wake = self._entries
        heappush(self._agenda, (time, self._entries, instance))

    def _advance(self, now: float) -> None:
        """Carry out what ends before `now`."""
        agenda = self._agenda
        while agenda and agenda[0][0] < now:
            time, entry, instance = heappop(agenda)
            if entry == instance.wake:
                self._end_steps(instance, time)
                self._begin_steps(instance, time)

    def _begin_steps(self, instance: _Instance, now: float) -> None:
        engine = instance.engine
        instance.began = now
        if engine.is_idle:
            instance.activity = _Activity.IDLE
            return
        end = engine.quiet_until(now)
        if end is None:
            instance.activity = _Activity.STEP
            instance.result = engine.step(now)
            end = now + instance.result.duration
        else:
            instance.activity = _Activity.QUIET
        self._wake_at(end, instance)

    def _end_steps(self, instance: _Instance, now: float) -> None:
        if instance.activity is _Activity.QUIET:
            instance.result = instance.engine.step(instance.began, _NEVER)
        result, instance.result = instance.result, None
        if result is None:
            return
        instance.busy += result.duration
        self._preempted += result.preempted
        if result.decoding:
            self._intervals.add(result.durations, result.decoding)
        for output in result.outputs:
            self._note(output, now)
        if result.events and self._policy.index is not None:
            message = encode_events(result.events, event_epoch=1, first_id=instance.next_event)
            instance.next_event += len(result.events)
            self._events.append((now + self._event_delay, instance.name, message))

    def _note(self, output: Output, now: float) -> None:
        record = self._records[output.request_id]
        if output.is_first:
            record.first_token = now
            record.cached_tokens = output.cached_tokens
            self._policy.first_token(output.request_id)
        elif output.resumes:
            self._intervals.add((now - record.last_token,), 1)
        record.last_token = now
        if output.is_last:
            self._policy.ended(output.request_id)

    def _tell_events(self, now: float) -> None:
        """Give the router's index what it knows by now."""
        index, events = self._policy.index, self._events
        while events and events[0][0] <= now:
            _, name, message = events.popleft()
            assert index is not None
            index.apply(name, message)
