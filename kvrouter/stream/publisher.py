"""The way of an engine's KV-cache events to the stream.

`publish` hands over and returns. A task of the event loop takes in what was handed over, lets
each rank's `EventLog` decide what goes out, and has a `BatchSender` publish it. Events that are
read on the loop itself go into the logs by a `LoopSink`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Final, Self, SupportsIndex

import anyio
from anyio.abc import TaskGroup

from dynbus import Actor, ConfigError, DynbusError, PayloadTooLarge, Unavailable
from dynbus.kvrouter.events import MAX_RANK, KvEvent
from dynbus.kvrouter.names import (
    AWARENESS,
    PUBLISHED,
    kv_abroad_subject,
    kv_event_subject,
    kv_resync_subject,
)
from dynbus.spi import (
    Background,
    Bus,
    Connection,
    Message,
    NoStream,
    Openable,
    check_token,
    monotonic,
    unix_time,
)

from .awareness import AwarenessLevel, CacheAwareness
from .cache_mirror import CacheMirror
from .event_buffer import DEFAULT_HANDED_BYTES, EventBuffer, own_events
from .event_log import EventLog, LogStatistics, OutgoingBatch
from .event_stream import EpochClock, EventStream, StoredEvents, ensure_stream, read_events
from .loop_sink import LoopSink
from .resync import decode_resync
from .summary import SUMMARY_INTERVAL, summarize

logger = logging.getLogger(__name__)

LINGER: Final = 0.001
"""Seconds for which events wait for others to share their message."""
EVENTS_PER_STEP: Final = 2048
"""Events after which the loop gets its turn again: some 10 ms of work."""
EVENTS_KEY: Final = "kv_events"
"""Of the process's status, while the events are not exact."""
PUBLISH_TIMEOUT: Final = 1.0
FIRST_RETRY: Final = 0.05
MAX_RETRY: Final = 1.0
HEADER_ROOM: Final = 512
"""Bytes of a message that are left to its headers."""

_LOSS: Final = "events were dropped since the event loop was blocked"

epochs: Final = EpochClock(lambda: int(unix_time() * 1e9))


class BatchSender:
    """Publishes the batches of an instance's ranks and tells their logs what became of them.

    Args:
        address: namespace, component and instance id.
        on_outcome: called with a log when it was told.

    Attributes:
        failures: publishes that were not acknowledged, and whatever else was noted as one.
        last_failure: its text; empty when a publish was acknowledged since.
        retry_at: monotonic seconds before which nothing is sent.
    """

    def __init__(
        self,
        connection: Connection,
        stream: EventStream,
        address: tuple[str, str, str],
        on_outcome: Callable[[EventLog], None],
    ) -> None:
        self.failures = 0
        self.last_failure = ""
        self.retry_at = 0.0
        self._connection = connection
        self._stream = stream
        self._address = address
        self._on_outcome = on_outcome
        self._tries = 0
        self._lacks_stream = False
        self._sending: dict[OutgoingBatch, tuple[EventLog, anyio.CancelScope]] = {}

    def __repr__(self) -> str:
        return f"<BatchSender {'.'.join(self._address)} [{len(self._sending)} in flight]>"

    @property
    def is_connected(self) -> bool:
        return self._connection.is_connected

    async def send(self, logs: Collection[EventLog], now: float, tasks: TaskGroup) -> None:
        """Send what the logs have to say, as far as that is possible now.

        Args:
            tasks: wait for the acknowledgements; what is in flight when they end is given up.
        """
        if now < self.retry_at or not self.is_connected:
            return
        if self._lacks_stream:
            try:
                await ensure_stream(
                    self._connection.jetstream, self._stream, timeout=PUBLISH_TIMEOUT
                )
            except DynbusError as error:
                self.note_failure(error)
                return
            self._lacks_stream = False
        for log in logs:
            log.limit_batches(self._connection.max_payload - HEADER_ROOM)
        for log in logs:
            while (batch := log.next_batch(now)) is not None:
                scope = anyio.CancelScope()
                self._sending[batch] = (log, scope)
                tasks.start_soon(self._publish, log, batch, scope)
                if not log.has_more:
                    # What comes while others have their turn waits for more to share a message.
                    break
                # A resend has many batches, and each takes some milliseconds to encode.
                await asyncio.sleep(0)
                if self.retry_at > now or not self.is_connected:
                    return
        for batch, (log, scope) in self._sending.items():
            if not log.is_current(batch):
                scope.cancel()

    def try_at_once(self) -> None:
        """Try at once, since what kept from sending is over."""
        self.retry_at = 0.0

    def note_failure(self, error: Exception) -> None:
        """Count a failure, and send nothing for a while."""
        self.failures += 1
        self.last_failure = str(error)
        now = monotonic()
        if now >= self.retry_at:
            delay = min(FIRST_RETRY * 2.0**self._tries, MAX_RETRY)
            self._tries = min(self._tries + 1, 10)
            self.retry_at = now + delay * random.uniform(0.5, 1.0)
            logger.warning("%r: %s; again in %.2f s", self, error, self.retry_at - now)

    async def _publish(self, log: EventLog, batch: OutgoingBatch, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                await self._store(log, batch)
        finally:
            del self._sending[batch]

    async def _store(self, log: EventLog, batch: OutgoingBatch) -> None:
        namespace, component, instance_id = self._address
        subject = kv_event_subject(namespace, component, instance_id, log.dp_rank)
        place = f"{instance_id}.{log.dp_rank}.{batch.event_epoch}.{batch.first_id}"
        fields = {PUBLISHED: f"{batch.since:.6f}"} if batch.since else {}
        if batch.awareness:
            fields[AWARENESS] = batch.awareness
        try:
            sequence = await self._connection.jetstream.publish(
                subject,
                batch.data,
                message_id=f"{place}.{batch.nonce}",
                headers=fields,
                timeout=PUBLISH_TIMEOUT,
            )
        except Exception as error:
            if not isinstance(error, DynbusError):
                # A batch that nobody hears of again would keep back all that follows it.
                logger.exception("%r: a batch could not be published", self)
            log.failed(batch)
            self._lacks_stream |= isinstance(error, NoStream)
            if isinstance(error, PayloadTooLarge):
                log.limit_batches(self._connection.max_payload - HEADER_ROOM)
            self.note_failure(error)
        else:
            self._tries = 0
            self.last_failure = ""
            log.stored(batch, sequence)
        self._on_outcome(log)


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The state of one rank's events.

    Attributes:
        blocks: held, counted once for each tier.
        waiting_bytes: of events that were not sent yet.
        in_flight: messages without an acknowledgement.
        unknown_parents: stored events that were left out, since their parent is not held.
        awareness: how far what the rank says can be relied on.
    """

    dp_rank: int
    event_epoch: int
    blocks: int
    waiting_bytes: int
    in_flight: int
    unknown_parents: int
    statistics: LogStatistics
    awareness: CacheAwareness


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """The state of a publisher.

    Attributes:
        failures: publishes that were not acknowledged, and steps that failed.
        malformed_requests: requests for a resync that cannot be read, or ask for no rank here.
        refused: calls with events that came after the publisher was closed.
        dropped: events that waited for a blocked event loop, when these were too many.
        last_failure: its text; empty when a publish was acknowledged since.
    """

    ranks: tuple[RankStatus, ...]
    failures: int
    malformed_requests: int
    refused: int
    dropped: int
    last_failure: str


class KvEventPublisher(Openable):
    """Publishes what the ranks of one instance hold in their caches. Use it with `async with`.

    Entering it makes the stream and begins to listen to routers. It raises `ConfigError` when the
    stream is there with other settings, and `Unavailable` when JetStream does not answer.

    Args:
        connection: belongs to the event loop on which the publisher is entered.
        instance_id: as its lease has it.
        ranks: those that exist before they publish anything.
        stream: the stream's settings; the defaults for this namespace unless given.
        max_handed_bytes: memory of a rank's events that the loop, which may be blocked, has not
            taken in. Beyond it they are dropped and counted, and the rank begins anew as if it
            held nothing.
        make_log: what numbers and batches a rank's events.
        bus: in whose status operators see how far the events can be relied on.
        background: see `Openable`.

    Raises:
        ConfigError: a name or rank is not usable, or the stream is another namespace's.
    """

    def __init__(
        self,
        connection: Connection,
        namespace: str,
        component: str,
        instance_id: str,
        *,
        ranks: Iterable[int] = (0,),
        stream: EventStream | None = None,
        linger: float = LINGER,
        max_handed_bytes: int = DEFAULT_HANDED_BYTES,
        make_log: Callable[[int], EventLog] | None = None,
        bus: Bus | None = None,
        background: Background | None = None,
    ) -> None:
        super().__init__(background)
        self._process_status = None if bus is None else bus.status
        self._shown = ""
        self._connection = connection
        self._address = (
            check_token("namespace", namespace),
            check_token("component", component),
            check_token("instance_id", instance_id),
        )
        # Not the component alone: its own instances show what is about others.
        self._name = f"{namespace}.{component}/{instance_id}"
        self.stream = stream or EventStream(namespace)
        if self.stream.namespace != namespace:
            raise ConfigError(
                f"the events of namespace {namespace} do not go to the stream of "
                f"{self.stream.namespace}: give EventStream({namespace!r}, ...)"
            )
        self._linger = linger
        self._make_log = make_log or partial(EventLog, epochs=epochs)
        self._logs: dict[int, EventLog] = {}
        self._ranks = [_check_rank(rank) for rank in ranks]
        self._event_buffer = EventBuffer(max_handed_bytes)
        self._is_woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._closed = False
        self._above = 0
        self._stepped = 0.0
        self._malformed_requests = 0
        self._refused = 0
        self._sender = BatchSender(connection, self.stream, self._address, self._on_outcome)

    def __repr__(self) -> str:
        return f"<KvEventPublisher {'.'.join(self._address)} [{len(self._logs)} ranks]>"

    @classmethod
    def of(
        cls, actor: Actor, *, ranks: Iterable[int] = (0,), stream: EventStream | None = None
    ) -> Self:
        """The publisher of an actor's instance, to be entered in its `on_start`."""
        return cls(
            actor.runtime.bus.data,
            *actor.__dynbus_name__,
            ranks=ranks,
            stream=stream,
            bus=actor.runtime.bus,
            background=actor.runtime.bus.background,
        )

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        connection = self._connection
        probe = kv_event_subject(*self._address, self._ranks[0])
        await ensure_stream(connection.jetstream, self.stream, probe=probe)
        self._above = await self._last_epoch()
        for rank in self._ranks:
            self._log(rank)
        for log in self._logs.values():
            # Some were there before it was known.
            log.begin_anew(above=self._above)
        subscription = connection.subscribe(kv_resync_subject(*self._address, "*"), self._on_resync)
        stop_listening = connection.on_connected(self._on_connected)
        try:
            await connection.barrier()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run, tasks)
                tasks.start_soon(self._tell_abroad)
                self._loop = asyncio.get_running_loop()
                yield
                tasks.cancel_scope.cancel()
        finally:
            self._closed = True
            stop_listening()
            subscription.unsubscribe()
            if self._process_status is not None:
                self._process_status.remove(self._name)

    async def close(self) -> None:
        """Stop publishing; what waits is given up, since the lease goes with the instance."""
        self._closed = True
        await super().close()

    # From any thread ------------------------------------------------------------------

    def publish(self, events: Sequence[KvEvent], *, dp_rank: int = 0) -> None:
        """Hand over events of one rank, in order. Never blocks; callable from any thread.

        Hashes are copied, so that lists and arrays of them may be changed afterwards.

        After `close` they are dropped and counted as `refused`: an engine may end a step late.

        Raises:
            InvalidEvents: one of them cannot be encoded, and which. None is taken then.
            RuntimeError: the publisher was not entered, or entering it failed.
        """
        taken = own_events(events)
        rank = _check_rank(dp_rank)
        if not self._takes():
            return
        if not self._event_buffer.put(rank, taken, unix_time()):
            logger.error(
                "%r: the event loop is blocked, and too many events of rank %d wait for it: they "
                "are dropped, and routers count the rank as empty until it stores more",
                self,
                rank,
            )
        self._wake_loop()

    def reset(self, dp_rank: int = 0) -> None:
        """The rank's engine was started anew with an empty cache. Callable from any thread.

        Raises:
            RuntimeError: the publisher was not entered, or entering it failed.
        """
        rank = _check_rank(dp_rank)
        if self._takes():
            self._event_buffer.reset(rank)
            self._wake_loop()

    def set_awareness(self, awareness: CacheAwareness, *, dp_rank: int = 0) -> None:
        """Say how far a rank's events can be relied on from now on: `exact` unless said.

        Routers get it with the next message, within a second or two. It may be said before the
        publisher is entered. Callable from any thread.

        Raises:
            ConfigError: the rank is not usable, or the level is `off`, which no rank can be.
        """
        rank = _check_rank(dp_rank)
        if awareness.level is AwarenessLevel.OFF:
            raise ConfigError("a rank cannot be off: give degraded, with the reason")
        if not self._closed:
            self._event_buffer.set_awareness(rank, awareness)
            self._wake_loop()

    def loop_sink(self, cache: CacheMirror | None = None) -> LoopSink:
        """A sink for an engine's reader on the publisher's own event loop; see `LoopSink`.

        Args:
            cache: what rank 0 holds, where several publishers share that: it is said as a whole.
        """
        if cache is not None:
            log = self._log(0)
            log.mirror = cache
            log.begin_anew()
            self._wake.set()
        return LoopSink(self._log, self._takes, self._wake.set)

    def _takes(self) -> bool:
        """True if events that are handed over now will be published."""
        if self._closed:
            self._refuse()
            return False
        if self._loop is None:
            raise RuntimeError(
                f"{self!r} was not entered, or entering it failed, so that nothing would ever be "
                "sent: enter it with `async with`, or in on_start with `await "
                "publisher.__aenter__()`, and publish then"
            )
        return True

    def _wake_loop(self) -> None:
        # Set before it is scheduled: at worst the loop is woken once too often.
        if not self._is_woken and self._loop is not None:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._notify)
            except RuntimeError:
                # The loop is closed, and with it the instance.
                self._refuse()

    def _refuse(self) -> None:
        if not self._refused:
            logger.warning("%r is closed: events that still come are dropped", self)
        self._refused += 1

    # On the loop ----------------------------------------------------------------------

    def status(self) -> PublisherStatus:
        """Counters of this publisher and its ranks."""
        ranks = tuple(
            RankStatus(
                log.dp_rank,
                log.event_epoch,
                log.mirror.digest().blocks,
                log.waiting_bytes,
                log.in_flight,
                log.mirror.unknown_parents,
                replace(log.statistics),
                log.awareness,
            )
            for log in self._logs.values()
        )
        return PublisherStatus(
            ranks=ranks,
            failures=self._sender.failures,
            malformed_requests=self._malformed_requests,
            refused=self._refused,
            dropped=self._event_buffer.dropped,
            last_failure=self._sender.last_failure,
        )

    async def flush(self, timeout: float = 5.0) -> None:
        """Wait until the stream has all that was handed over.

        Raises:
            Unavailable: it does not within `timeout` seconds.
        """
        try:
            with anyio.fail_after(timeout):
                while not self._event_buffer.is_empty or not all(
                    log.is_idle for log in self._logs.values()
                ):
                    self._progress.clear()
                    self._wake.set()
                    await self._progress.wait()
        except TimeoutError:
            why = f": {self._sender.last_failure}" if self._sender.last_failure else ""
            raise Unavailable(f"events were not stored within {timeout} s{why}") from None

    def _notify(self) -> None:
        self._is_woken = False
        self._wake.set()

    def _show_awareness(self) -> None:
        """Show how far the ranks' events can be relied on in the process's status."""
        said = ", ".join(
            f"rank {dp_rank}: {log.awareness}"
            for dp_rank, log in self._logs.items()
            if log.awareness.level is not AwarenessLevel.EXACT
        )
        if self._process_status is None or said == self._shown:
            return
        self._shown = said
        if said:
            self._process_status.put(self._name, self._name, {EVENTS_KEY: said})
        else:
            self._process_status.remove(self._name)

    def _on_connected(self) -> None:
        self._sender.try_at_once()
        self._wake.set()

    def _on_resync(self, message: Message) -> None:
        rank = message.subject.rpartition(".")[2]
        log = self._logs.get(int(rank)) if rank.isdecimal() and len(rank) < 6 else None
        request = decode_resync(message.data)
        if log is None or request is None:
            self._malformed_requests += 1
            return
        whose = ".".join(self._address)
        logger.info(
            "a router has rank %s of %s send its events again: %s", rank, whose, request.reason
        )
        log.ask_resync(request.event_epoch, monotonic())
        self._wake.set()

    def _log(self, dp_rank: int) -> EventLog:
        log = self._logs.get(dp_rank)
        if log is None:
            log = self._logs[dp_rank] = self._make_log(dp_rank)
            log.begin_anew(above=self._above)
        return log

    async def _last_epoch(self) -> int:
        """The epoch of the last message of this instance id, in case the wall clock went back.

        One that no index takes counts as none.
        """
        subject = kv_event_subject(*self._address, "*")
        stored = await self._connection.jetstream.last(self.stream.name, subject)
        events = None if stored is None else read_events(stored)
        return events.batch.event_epoch if isinstance(events, StoredEvents) else 0

    async def _run(self, tasks: TaskGroup) -> None:
        while True:
            await self._wait()
            self._wake.clear()
            await asyncio.sleep(self._linger if self._event_buffer.events < EVENTS_PER_STEP else 0)
            try:
                self._take_in()
                now = self._stepped = monotonic()
                for log in self._logs.values():
                    log.append_digest(unix_time(), now)
                await self._sender.send(list(self._logs.values()), now, tasks)
            except Exception as error:
                # An engine without its publisher would look idle for ever.
                logger.exception("%r: a step failed, so everything is sent again", self)
                self._sender.note_failure(error)
                for log in self._logs.values():
                    log.begin_anew()
            self._progress.set()

    async def _tell_abroad(self) -> None:
        """Tell other regions now and then what each rank holds, in short."""
        connection = self._connection
        while True:
            await anyio.sleep(SUMMARY_INTERVAL)
            for dp_rank, log in list(self._logs.items()):
                region = connection.region
                if region and connection.is_connected:
                    summary = summarize(log.mirror, connection.max_payload)
                    subject = kv_abroad_subject(region, *self._address, dp_rank)
                    connection.publish(subject, summary)
                # Each takes some milliseconds: whatever else the loop serves comes between.
                await asyncio.sleep(0)

    def _take_in(self) -> None:
        """Take in what was handed over, or as much of it as does not keep the loop for long."""
        taken = 0
        while taken < EVENTS_PER_STEP and (handed := self._event_buffer.pop(EVENTS_PER_STEP)):
            log = self._log(handed.dp_rank)
            if handed.begins_anew:
                log.forget(loss=_LOSS if handed.is_lossy else "")
            if handed.events:
                log.append(handed.events, handed.since)
            if handed.awareness is not None:
                log.set_awareness(handed.awareness)
            taken += len(handed.events)
        self._show_awareness()
        if not self._event_buffer.is_empty:
            self._wake.set()

    async def _wait(self) -> None:
        """Wait for something to do."""
        due = [log.digest_at for log in self._logs.values()]
        if self._sender.is_connected:
            # What comes before `retry_at` was put off; what is due later was not looked at.
            retry_at = self._sender.retry_at
            for log in self._logs.values():
                if log.resync_at is not None:
                    due.append(max(log.resync_at, retry_at))
                elif not log.is_idle and retry_at > self._stepped:
                    due.append(retry_at)
        with anyio.move_on_after(max(0.0, min(due) - monotonic()) if due else None):
            await self._wake.wait()

    def _on_outcome(self, log: EventLog) -> None:
        """A log was told what became of one of its batches."""
        self._progress.set()
        if not log.is_idle:
            self._wake.set()  # A place is free, or a batch is to be repeated.


def _check_rank(dp_rank: object) -> int:
    if isinstance(dp_rank, int):
        # Each step of an engine comes here, and looking for a protocol's methods takes long.
        rank = dp_rank
    else:
        rank = index(dp_rank) if isinstance(dp_rank, SupportsIndex) else -1
    if not 0 <= rank <= MAX_RANK:
        raise ConfigError(f"dp_rank = {dp_rank!r}: give a number from 0 to {MAX_RANK}")
    return int(rank)
