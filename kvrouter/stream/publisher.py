"""The way of an engine's KV-cache events to the stream.

`publish` hands over and returns. A task of the event loop takes in what was handed over, lets
each rank's `EventLog` decide what goes out, and publishes it with several messages in flight.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from operator import index
from types import TracebackType
from typing import Final, Self, SupportsIndex

from dynbus.actors import Actor
from dynbus.bus import headers
from dynbus.bus.cleanup import finish
from dynbus.bus.clock import monotonic, unix_time
from dynbus.bus.errors import ConfigError, DynbusError, PayloadTooLarge, Unavailable
from dynbus.bus.names import check_token, kv_event_subject, kv_resync_subject
from dynbus.bus.transport import Connection, ConnectionState, Message, NoStream
from dynbus.kvrouter.events import HEADER, KvEvent

from .event_log import MAX_ASKED_EPOCH, Batch, EpochClock, EventLog
from .event_stream import EventStream, ensure_stream
from .own_events import own_events
from .publisher_status import PublisherStatus, rank_status
from .resync import decode_resync

logger = logging.getLogger(__name__)

LINGER: Final = 0.001
"""Seconds for which events wait for others to share their message."""
PUBLISH_TIMEOUT: Final = 1.0
FIRST_RETRY: Final = 0.05
MAX_RETRY: Final = 1.0
HEADER_ROOM: Final = 512
"""Bytes of a message that are left to its headers."""
EVENTS_PER_STEP: Final = 2048
"""Events after which the loop gets its turn again: some 10 ms of work."""
MAX_RANK: Final = (1 << 16) - 1

epochs: Final = EpochClock(time.time_ns)


class KvEventPublisher:
    """Publishes what the ranks of one instance hold in their caches. Use it with `async with`.

    Args:
        connection: belongs to the event loop on which the publisher is entered.
        instance_id: as its lease has it.
        ranks: those that exist before they publish anything.
        stream: the stream's settings; the defaults for this namespace unless given.
        make_log: what numbers and batches a rank's events.

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
        make_log: Callable[[int], EventLog] | None = None,
    ) -> None:
        self._connection = connection
        self._address = (
            check_token("namespace", namespace),
            check_token("component", component),
            check_token("instance_id", instance_id),
        )
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
        self._inbox: deque[tuple[int, float, Sequence[KvEvent] | None]] = deque()
        self._is_woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._sending: dict[Batch, tuple[EventLog, asyncio.Task[None]]] = {}
        self._exits = AsyncExitStack()
        self._closed = False
        self._above = 0
        self._stepped = 0.0
        self._retry_at = 0.0
        self._tries = 0
        self._lacks_stream = False
        self._failures = 0
        self._malformed_requests = 0
        self._refused = 0
        self._last_failure = ""

    def __repr__(self) -> str:
        return f"<KvEventPublisher {'.'.join(self._address)} [{len(self._logs)} ranks]>"

    @classmethod
    def of(
        cls, actor: Actor, *, ranks: Iterable[int] = (0,), stream: EventStream | None = None
    ) -> Self:
        """The publisher of an actor's instance, to be entered in its `on_start`."""
        return cls(
            actor.runtime.bus.data,
            type(actor).__dynbus_namespace__,
            type(actor).__dynbus_component__,
            actor.instance_id,
            ranks=ranks,
            stream=stream,
        )

    async def __aenter__(self) -> Self:
        """Make the stream, listen to routers, and begin to publish.

        Raises:
            ConfigError: the stream is there with other settings.
            Unavailable: JetStream does not answer.
        """
        self._loop = asyncio.get_running_loop()
        jetstream = self._connection.jetstream
        await ensure_stream(jetstream, self.stream)
        self._above = await self._last_epoch()
        for rank in self._ranks:
            self._log(rank)
        async with AsyncExitStack() as exits:
            subscription = self._connection.subscribe(
                kv_resync_subject(*self._address, "*"), self._on_resync
            )
            exits.callback(subscription.unsubscribe)
            await self._connection.barrier()
            exits.callback(self._connection.on_state(self._on_state))
            task = self._loop.create_task(self._run(), name=f"kv-events-{self._address[2]}")
            exits.push_async_callback(_end, task)
            self._exits = exits.pop_all()
        self._notify()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await finish(self.close())

    async def close(self) -> None:
        """Stop publishing; what waits is given up, since the lease goes with the instance."""
        self._closed = True
        await self._exits.aclose()
        sending = [task for _, task in self._sending.values()]
        for task in sending:
            task.cancel()
        if sending:
            await asyncio.wait(sending)

    # From any thread ------------------------------------------------------------------

    def publish(self, events: Sequence[KvEvent], *, dp_rank: int = 0) -> None:
        """Hand over events of one rank, in order. Never blocks; callable from any thread.

        Hashes are copied, so that lists and arrays of them may be changed afterwards.

        After `close` they are dropped and counted as `refused`: an engine may end a step late.

        Raises:
            InvalidEvents: one of them cannot be encoded, and which. None is taken then.
            RuntimeError: the publisher was not entered yet.
        """
        taken = own_events(events)
        self._hand_over(_check_rank(dp_rank), taken)

    def reset(self, dp_rank: int = 0) -> None:
        """The rank's engine was started anew with an empty cache. Callable from any thread.

        Raises:
            RuntimeError: the publisher was not entered yet.
        """
        self._hand_over(_check_rank(dp_rank), None)

    def _hand_over(self, dp_rank: int, events: Sequence[KvEvent] | None) -> None:
        if self._closed:
            self._refuse()
            return
        if self._loop is None:
            raise RuntimeError(
                f"{self!r} was not entered, so that nothing would ever be sent: enter it with "
                "`async with`, or in on_start with `await publisher.__aenter__()`, and publish then"
            )
        self._inbox.append((dp_rank, unix_time(), events))
        # Set before it is scheduled: at worst the loop is woken once too often.
        if not self._is_woken:
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
        return PublisherStatus(
            tuple(rank_status(log) for log in self._logs.values()),
            self._failures,
            self._malformed_requests,
            self._refused,
            self._last_failure,
        )

    async def flush(self, timeout: float = 5.0) -> None:
        """Wait until the stream has all that was handed over.

        Raises:
            Unavailable: it does not within `timeout` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                while self._inbox or not all(log.is_idle for log in self._logs.values()):
                    self._progress.clear()
                    self._wake.set()
                    await self._progress.wait()
        except TimeoutError:
            why = f": {self._last_failure}" if self._last_failure else ""
            raise Unavailable(f"events were not stored within {timeout} s{why}") from None

    def _notify(self) -> None:
        self._is_woken = False
        self._wake.set()

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            self._retry_at = 0.0
            self._wake.set()

    def _on_resync(self, message: Message) -> None:
        rank = message.subject.rpartition(".")[2]
        log = self._logs.get(int(rank)) if rank.isdecimal() and len(rank) < 6 else None
        request = decode_resync(message.data)
        if log is None or request is None:
            self._malformed_requests += 1
            return
        logger.info("rank %s of %s is asked to resend: %s", rank, self._address, request.reason)
        log.ask_resync(request.event_epoch, monotonic())
        self._wake.set()

    def _log(self, dp_rank: int) -> EventLog:
        log = self._logs.get(dp_rank)
        if log is None:
            log = self._logs[dp_rank] = self._make_log(dp_rank)
            log.begin_anew(above=self._above)
        return log

    async def _last_epoch(self) -> int:
        """The epoch of the last message of this instance id, in case the wall clock went back."""
        subject = kv_event_subject(*self._address, "*")
        stored = await self._connection.jetstream.last(self.stream.name, subject)
        if stored is None or len(stored.data) < HEADER.size:
            return 0
        epoch: int = HEADER.unpack_from(stored.data)[4]
        return epoch if epoch < MAX_ASKED_EPOCH else 0

    async def _run(self) -> None:
        while True:
            await self._wait()
            self._wake.clear()
            await asyncio.sleep(self._linger if len(self._inbox) < EVENTS_PER_STEP else 0)
            try:
                await self._step()
            except Exception as error:
                # An engine without its publisher would look idle for ever.
                logger.exception("%r: a step failed, all is sent again", self)
                self._note_failure(error)
                for log in self._logs.values():
                    log.begin_anew()
            self._progress.set()

    @property
    def _is_connected(self) -> bool:
        return self._connection.state is ConnectionState.CONNECTED

    async def _step(self) -> None:
        self._take_inbox()
        now = self._stepped = monotonic()
        for log in self._logs.values():
            log.append_digest(unix_time(), now)
        if now < self._retry_at or not self._is_connected:
            return
        if self._lacks_stream:
            try:
                await ensure_stream(
                    self._connection.jetstream, self.stream, timeout=PUBLISH_TIMEOUT
                )
            except DynbusError as error:
                self._note_failure(error)
                return
            self._lacks_stream = False
        self._limit_batches()
        for log in self._logs.values():
            while (batch := log.next_batch(now)) is not None:
                self._send(log, batch)
                # A resend has many batches, and each takes some milliseconds to encode.
                await asyncio.sleep(0)
                if self._retry_at > now or not self._is_connected:
                    return
        for batch, (log, task) in self._sending.items():
            if not log.is_current(batch):
                task.cancel()

    def _take_inbox(self) -> None:
        """Take in what was handed over, or as much of it as does not keep the loop for long."""
        inbox = self._inbox
        taken = 0
        while inbox and taken < EVENTS_PER_STEP:
            dp_rank, since, events = inbox.popleft()
            log = self._log(dp_rank)
            if events is None:
                log.mirror.clear()
                log.begin_anew()
                continue
            # What one rank handed over in a row is cheaper to take in at once.
            merged = list(events)
            while (
                len(merged) < EVENTS_PER_STEP
                and inbox
                and inbox[0][0] == dp_rank
                and (following := inbox[0][2]) is not None
            ):
                inbox.popleft()
                merged += following
            log.append(merged, since)
            taken += len(merged)
        if inbox:
            self._wake.set()

    def _limit_batches(self) -> None:
        room = self._connection.max_payload - HEADER_ROOM
        for log in self._logs.values():
            log.limit_batches(room)

    async def _wait(self) -> None:
        """Wait for something to do."""
        due = [log.digest_at for log in self._logs.values()]
        if self._connection.state is ConnectionState.CONNECTED:
            # What comes before `_retry_at` was put off; what is due later was not looked at.
            for log in self._logs.values():
                if log.resync_at is not None:
                    due.append(max(log.resync_at, self._retry_at))
                elif not log.is_idle and self._retry_at > self._stepped:
                    due.append(self._retry_at)
        try:
            limit = max(0.0, min(due) - monotonic()) if due else None
            async with asyncio.timeout(limit):
                await self._wake.wait()
        except TimeoutError:
            return

    def _send(self, log: EventLog, batch: Batch) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._publish(log, batch), name="kv-events-batch")
        self._sending[batch] = (log, task)
        task.add_done_callback(lambda _: self._sending.pop(batch, None))

    async def _publish(self, log: EventLog, batch: Batch) -> None:
        namespace, component, instance_id = self._address
        subject = kv_event_subject(namespace, component, instance_id, log.dp_rank)
        number = f"{instance_id}.{log.dp_rank}.{batch.event_epoch}.{batch.first_id}"
        fields = {headers.PUBLISHED: f"{batch.since:.6f}"} if batch.since else None
        try:
            sequence = await self._connection.jetstream.publish(
                subject, batch.data, message_id=number, headers=fields, timeout=PUBLISH_TIMEOUT
            )
        except DynbusError as error:
            log.failed(batch)
            self._lacks_stream |= isinstance(error, NoStream)
            if isinstance(error, PayloadTooLarge):
                self._limit_batches()
            self._note_failure(error)
        else:
            self._tries = 0
            self._last_failure = ""
            log.stored(batch, sequence)
        self._progress.set()
        if not log.is_idle:
            self._wake.set()  # A place is free, or a batch is to be repeated.

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        self._last_failure = str(error)
        now = monotonic()
        if now >= self._retry_at:
            delay = min(FIRST_RETRY * 2.0**self._tries, MAX_RETRY)
            self._tries = min(self._tries + 1, 10)
            self._retry_at = now + delay * random.uniform(0.5, 1.0)
            logger.warning("%r: %s; again in %.2f s", self, error, self._retry_at - now)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _check_rank(dp_rank: object) -> int:
    rank = index(dp_rank) if isinstance(dp_rank, SupportsIndex) else -1
    if not 0 <= rank <= MAX_RANK:
        raise ConfigError(f"dp_rank = {dp_rank!r}: give a number from 0 to {MAX_RANK}")
    return int(rank)
