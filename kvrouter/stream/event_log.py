"""The event log of one rank: its events numbered and batched, and its whole state when needed.

`EventLog` decides, without I/O or clock. Events go out in batches, several in flight. As soon
as it cannot be known that all of an epoch's batches are stored, each once and in order, a new
epoch begins that says everything again: nothing is ever lost in silence.

    events ──► mirror ──► waiting ──► batch in flight ──► stored
                  │          │ too much                     │ out of order
                  └──────────┴──► new epoch: state ◄────────┘
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

from dynbus.kvrouter.events import (
    HEADER,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheDigest,
    KvEvent,
    encode_events,
)

from .awareness import EXACT, AwarenessLevel, CacheAwareness, encode_awareness
from .cache_mirror import CacheMirror
from .event_stream import EpochClock

DEFAULT_BATCH_BYTES: Final = 256 * 1024
DEFAULT_WAITING_BYTES: Final = 32 * 1024 * 1024
DEFAULT_IN_FLIGHT: Final = 32
DIGEST_AFTER: Final = 1.0
"""Seconds after a digest, or less, at which one follows when there were events since."""
DIGEST_INTERVAL: Final = 10.0
"""Seconds after a digest at which one follows in any case: who is silent for longer is lost."""
RESYNC_INTERVAL: Final = 0.5
"""Seconds between two resends that were asked for."""
STORED_BYTES: Final = 16
"""Of a stored block: the engine's hash, and that of its tokens."""
EVENT_BYTES: Final = 13
PADDING_BYTES: Final = 11
FRAME_BYTES: Final = HEADER.size + PADDING_BYTES
"""Of a message, beside its events."""


def event_bytes(event: KvEvent | CacheDigest) -> int:
    """The bytes that an event adds to a message at most."""
    if isinstance(event, BlockStored):
        return EVENT_BYTES + STORED_BYTES * len(event.engine_hashes)
    if isinstance(event, BlockRemoved):
        return EVENT_BYTES + 8 * len(event.engine_hashes)
    return EVENT_BYTES + STORED_BYTES


def pieces(event: KvEvent, max_bytes: int) -> Iterator[KvEvent]:
    """An event in pieces that fit a message of `max_bytes` each."""
    room = max_bytes - FRAME_BYTES - EVENT_BYTES
    if not isinstance(event, BlockStored | BlockRemoved) or event_bytes(event) <= room:
        yield event
        return
    if isinstance(event, BlockRemoved):
        step = room // 8
        for at in range(0, len(event.engine_hashes), step):
            yield BlockRemoved(event.engine_hashes[at : at + step], event.tier)
        return
    step = room // STORED_BYTES
    parent = event.parent_hash
    for at in range(0, len(event.engine_hashes), step):
        engine_hashes = event.engine_hashes[at : at + step]
        blocks = event.block_hashes[at : at + step]
        yield BlockStored(parent, engine_hashes, blocks, event.tier)
        parent = int(engine_hashes[-1])


_nonce: Final = partial(secrets.token_hex, 8)


class BatchState(Enum):
    IN_FLIGHT = "in_flight"
    STORED = "stored"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class OutgoingBatch:
    """A message to be published.

    Attributes:
        since: Unix seconds at which its first live event was handed over; 0 for state alone.
        awareness: what the rank says of its events, see `encode_awareness`.
        sequence: where the stream has it.
        nonce: of its message id. Instances of other components publish to the same stream, and one
            that guessed an id would have the server take this for a repeat of theirs.
    """

    event_epoch: int
    first_id: int
    events: int
    data: bytes
    since: float
    awareness: str = ""
    state: BatchState = BatchState.IN_FLIGHT
    sequence: int = 0
    nonce: str = field(default_factory=_nonce)


class _Waiting(NamedTuple):
    event: KvEvent | CacheDigest
    size: int
    since: float


@dataclass(slots=True)
class LogStatistics:
    """The counters of one rank's log.

    Attributes:
        events, batches, bytes: stored in the stream, resent state included.
        repeats: batches that were published again with the same id.
        epochs: how often numbering began.
        overflows: epochs because too much waited.
        disorders: epochs because the stream was made again, or has batches out of order.
        resyncs: epochs because a router asked.
        coalesced: requests that an epoch on its way answers already.
    """

    events: int = 0
    batches: int = 0
    bytes: int = 0
    repeats: int = 0
    epochs: int = 0
    overflows: int = 0
    disorders: int = 0
    resyncs: int = 0
    coalesced: int = 0


class EventLog:
    """The events of one rank on their way to the stream. Times are of one monotonic clock.

    Args:
        max_batch_bytes: of a message, without its headers.
        max_waiting_bytes: of events that wait; beyond that a new epoch resends the state.
        max_in_flight: batches that may be unacknowledged.

    Attributes:
        mirror: what the rank holds. Who takes events in there by himself says them by `tell`.
        waiting_bytes: of the events that wait, resent state not counted.
        resync_at: when a resend that was asked for is due; None for none.
    """

    def __init__(
        self,
        dp_rank: int,
        epochs: EpochClock,
        *,
        max_batch_bytes: int = DEFAULT_BATCH_BYTES,
        max_waiting_bytes: int = DEFAULT_WAITING_BYTES,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
    ) -> None:
        self.dp_rank = dp_rank
        self.mirror = CacheMirror()
        self.statistics = LogStatistics()
        self.waiting_bytes = 0
        self.event_epoch = 0
        self._epochs = epochs
        self._max_batch_bytes = max_batch_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._max_in_flight = max_in_flight
        self._digested = 0.0
        self._changed = False
        self._next_id = 0
        self._begins_anew = True
        self._above = 0
        self._state: Iterator[_Waiting] = iter(())
        self._next_of_state: _Waiting | None = None
        self._waiting: deque[_Waiting] = deque()
        self._in_flight: deque[OutgoingBatch] = deque()
        self._last_sequence = 0
        self._resynced = 0.0
        self.resync_at: float | None = None
        self._stated = EXACT
        self._loss = ""

    def __repr__(self) -> str:
        return (
            f"<EventLog {self.dp_rank} [epoch {self.event_epoch} | next: {self._next_id}, "
            f"waiting: {len(self._waiting)}, in flight: {len(self._in_flight)}]>"
        )

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """True if everything that was handed over is stored."""
        return not (
            self._begins_anew
            or self.resync_at is not None
            or self._waiting
            or self._in_flight
            or self._next_of_state
        )

    @property
    def has_more(self) -> bool:
        """True if something waits, or a batch is to be repeated."""
        return bool(self._begins_anew or self._waiting or self._next_of_state or self.must_repeat)

    @property
    def must_repeat(self) -> bool:
        """True if a batch in flight failed, so that nothing new goes out before it is repeated."""
        return any(batch.state is BatchState.FAILED for batch in self._in_flight)

    # Events ---------------------------------------------------------------------------

    def append(self, events: Sequence[KvEvent], since: float) -> None:
        """Take in events.

        Args:
            since: Unix seconds at which they were handed over.
        """
        self.tell(self.mirror.apply(events), since)

    def tell(self, events: Sequence[KvEvent], since: float) -> None:
        """The same for events that `mirror` has taken in."""
        if self._loss and any(isinstance(event, AllBlocksCleared) for event in events):
            self._loss = ""
        self._changed = self._changed or bool(events)
        if self._begins_anew:
            return  # The new epoch will say it all.
        room = self._max_batch_bytes - FRAME_BYTES
        for event in events:
            size = event_bytes(event)
            if size <= room:
                self._waiting.append(_Waiting(event, size, since))
                self.waiting_bytes += size
            else:
                for piece in pieces(event, self._max_batch_bytes):
                    self._add(piece, since)
        if self.waiting_bytes > self._max_waiting_bytes:
            self.statistics.overflows += 1
            self.begin_anew()

    @property
    def awareness(self) -> CacheAwareness:
        """The degree to which what this rank says can be relied on."""
        if self._loss:
            return CacheAwareness(AwarenessLevel.DEGRADED, self._loss)
        return self._stated

    def set_awareness(self, awareness: CacheAwareness) -> None:
        """Set the degree to which the engine's events can be relied on. It is said with the next
        digest, which comes as soon as one does after events."""
        self._changed = self._changed or awareness != self._stated
        self._stated = awareness

    def forget(self, *, loss: str = "") -> None:
        """Void what the rank held; a new epoch begins.

        Args:
            loss: what was dropped, so that blocks are missing until the engine clears its cache.
        """
        self.mirror.clear()
        self._loss = loss
        self.begin_anew()

    @property
    def digest_at(self) -> float:
        """The time at which the next digest is due."""
        return self._digested + (DIGEST_AFTER if self._changed else DIGEST_INTERVAL)

    def append_digest(self, since: float, now: float) -> None:
        """Say what is held after all events so far, if that is due."""
        if now < self.digest_at:
            return
        self._digested, self._changed = now, False
        if not self._begins_anew:
            self._add(self.mirror.digest(), since)

    def begin_anew(self, *, above: int = 0) -> None:
        """Have a new epoch say again what is held at the time at which it can be published."""
        self._begins_anew = True
        self._above = max(self._above, above)
        self.resync_at = None
        self._state = iter(())
        self._next_of_state = None
        self._waiting.clear()
        self.waiting_bytes = 0

    def limit_batches(self, max_bytes: int) -> None:
        """Make batches no larger than `max_bytes` from now on, in a new epoch if one was."""
        if max_bytes < self._max_batch_bytes:
            self._max_batch_bytes = max_bytes
            self.begin_anew()

    def ask_resync(self, known_epoch: int, now: float) -> None:
        """A router lacks blocks.

        Requests for what is on its way already, and all that come within `RESYNC_INTERVAL`,
        cost one resend.

        Args:
            known_epoch: the newest epoch that the router knows; 0 for none.
        """
        if not self._epochs.is_credible(known_epoch):
            known_epoch = 0
        if self._begins_anew or 0 < known_epoch < self.event_epoch:
            self.statistics.coalesced += 1
            return
        if known_epoch > self.event_epoch:
            self._above = max(self._above, known_epoch)
        if self.resync_at is not None:
            self.statistics.coalesced += 1
            return
        self.resync_at = max(now, self._resynced + RESYNC_INTERVAL)

    # Batches --------------------------------------------------------------------------

    def next_batch(self, now: float) -> OutgoingBatch | None:
        """The next batch to publish; None while there is nothing, or its place is not free.

        To be asked only when it can be published: an epoch begins with what is held now.
        """
        if self.resync_at is not None and now >= self.resync_at:
            self.statistics.resyncs += 1
            self.begin_anew()
        if self._begins_anew:
            self._begin(now)
        if self.must_repeat:
            return self._next_repeat()
        if len(self._in_flight) >= self._max_in_flight:
            return None
        return self._collect()

    def is_current(self, batch: OutgoingBatch) -> bool:
        """True if the outcome of a batch still matters."""
        return batch in self._in_flight

    def stored(self, batch: OutgoingBatch, sequence: int) -> None:
        """The stream has a batch at `sequence`."""
        if not self.is_current(batch):
            return
        batch.state = BatchState.STORED
        batch.sequence = sequence
        while self._in_flight and self._in_flight[0].state is BatchState.STORED:
            first = self._in_flight.popleft()
            if first.sequence <= self._last_sequence:
                # A later batch overtook it, or the stream is another one than before.
                self.statistics.disorders += 1
                self.begin_anew()
                return
            self._last_sequence = first.sequence
            self.statistics.batches += 1
            self.statistics.events += first.events
            self.statistics.bytes += len(first.data)

    def failed(self, batch: OutgoingBatch) -> None:
        """Note that a batch may or may not have reached the stream."""
        if self.is_current(batch):
            batch.state = BatchState.FAILED

    # Inside ---------------------------------------------------------------------------

    def _add(self, event: KvEvent | CacheDigest, since: float) -> None:
        waiting = _Waiting(event, event_bytes(event), since)
        self._waiting.append(waiting)
        self.waiting_bytes += waiting.size

    def _begin(self, now: float) -> None:
        self._begins_anew = False
        self.event_epoch = self._epochs.next(max(self._above, self.event_epoch))
        self._above = 0
        self._next_id = 0
        self._in_flight.clear()
        self._last_sequence = 0
        self._resynced = now
        self._digested, self._changed = now, False
        self.statistics.epochs += 1
        whole = self.mirror.state()
        state = (piece for event in whole for piece in pieces(event, self._max_batch_bytes))
        everything = chain(state, [self.mirror.digest()])
        self._state = (_Waiting(event, event_bytes(event), 0.0) for event in everything)
        self._next_of_state = next(self._state, None)

    def _next_repeat(self) -> OutgoingBatch | None:
        """The first failed batch, once it is known what became of all that are on their way."""
        batches = self._in_flight
        if any(batch.state is BatchState.IN_FLIGHT for batch in batches):
            return None
        for batch in batches:
            if batch.state is BatchState.FAILED:
                batch.state = BatchState.IN_FLIGHT
                self.statistics.repeats += 1
                return batch
        return None

    def _collect(self) -> OutgoingBatch | None:
        events: list[KvEvent | CacheDigest] = []
        size = FRAME_BYTES
        since = 0.0
        while (waiting := self._next_of_state) is not None:
            if events and size + waiting.size > self._max_batch_bytes:
                break
            events.append(waiting.event)
            size += waiting.size
            self._next_of_state = next(self._state, None)
        # A digest ends its message: an index is compared after it was applied.
        ends = bool(events) and isinstance(events[-1], CacheDigest)
        while self._waiting and self._next_of_state is None and not ends:
            waiting = self._waiting[0]
            if events and size + waiting.size > self._max_batch_bytes:
                break
            self._waiting.popleft()
            events.append(waiting.event)
            size += waiting.size
            self.waiting_bytes -= waiting.size
            since = since or waiting.since
            ends = isinstance(waiting.event, CacheDigest)
        if not events:
            return None
        data = encode_events(
            events, event_epoch=self.event_epoch, first_id=self._next_id, dp_rank=self.dp_rank
        )
        said = encode_awareness(self.awareness)
        batch = OutgoingBatch(self.event_epoch, self._next_id, len(events), data, since, said)
        self._next_id += len(events)
        self._in_flight.append(batch)
        return batch
