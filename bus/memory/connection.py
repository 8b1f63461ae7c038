"""A connection to the in-memory bus: two queues, and what happens to them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, TypeVar

from dynbus.bus.drops import DropReason
from dynbus.bus.errors import ConfigError, DynbusError, PayloadTooLarge, Unavailable
from dynbus.bus.transport import Callback, ConnectionState, Message
from dynbus.bus.watched_connection import WatchedConnection

from .jetstream import JetStreamServer, MemoryJetStream

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOW_BACKLOG: Final = 1024 * 1024


class Server(Protocol):
    """What a connection needs of the bus that it belongs to."""

    name: str
    max_payload: int
    running: bool
    numbers: Iterator[int]
    jetstream: JetStreamServer

    def add(self, subscription: MemorySubscription) -> None: ...
    def remove(self, subscription: MemorySubscription) -> None: ...
    def forget(self, connection: MemoryConnection) -> None: ...
    def leave(self, connection: MemoryConnection) -> None: ...
    def accept(self, sender: MemoryConnection, message: Message) -> None: ...
    def disturb(self, message: Message, action: Callable[[], None]) -> None: ...
    def store(self, message: Message, answer: Callable[[int | DynbusError], None]) -> None: ...


class MemorySubscription:
    """A subscription of a `MemoryConnection`."""

    __slots__ = ("_callback", "active", "connection", "number", "queue", "subject")

    def __init__(
        self,
        connection: MemoryConnection,
        number: int,
        subject: str,
        queue: str,
        callback: Callback,
    ) -> None:
        self.connection = connection
        self.number = number
        self.subject = subject
        self.queue = queue
        self.active = True
        self._callback = callback

    def unsubscribe(self) -> None:
        if self.active:
            self.active = False
            self.connection.remove(self)

    async def drain(self, *, timeout: float = 5.0) -> None:
        if self.active:
            self.connection.remove(self)
            if self.connection.state is ConnectionState.CONNECTED:
                with suppress(Unavailable):
                    await self.connection.barrier(timeout=timeout)
            self.active = False

    def receive(self, message: Message) -> None:
        self._callback(message)


class MemoryConnection(WatchedConnection):
    """A connection to a `MemoryBus`; made by `MemoryBus.connect`."""

    def __init__(self, bus: Server, name: str, number: int) -> None:
        super().__init__(name, ConnectionState.CONNECTED)
        self.inbox = f"_INBOX.{number}"
        self._bus = bus
        self._kept_away = False
        self._partitioned = False
        self._subscriptions: dict[int, MemorySubscription] = {}
        self._outbound: deque[tuple[int, Callable[[], None]]] = deque()
        self._inbound: deque[Callable[[], None]] = deque()
        self._backlog = 0
        self._flush_scheduled = False
        self._drain_scheduled = False
        self._flush_waiters: list[asyncio.Future[None]] = []
        self._answers: set[asyncio.Future[None]] = set()
        self._numbers = itertools.count(1)
        self._jetstream = MemoryJetStream(self, bus.jetstream, bus.store)

    def __repr__(self) -> str:
        return (
            f"<MemoryConnection {self.name} [{self._state.value} | "
            f"subscriptions: {len(self._subscriptions)}, sessions: {self.sessions}]>"
        )

    @property
    def max_payload(self) -> int:
        return self._bus.max_payload

    @property
    def backlog(self) -> int:
        return self._backlog

    @property
    def server_name(self) -> str:
        return self._bus.name

    @property
    def jetstream(self) -> MemoryJetStream:
        return self._jetstream

    @property
    def has_peers(self) -> bool:
        return False

    def on_peer_lost(self, listener: Callable[[], None]) -> None:
        """In memory there is one server, so `listener` is never called."""

    def on_error(self, listener: Callable[[DynbusError, str], None]) -> None:
        """In memory no subject is refused, so `listener` is never called."""

    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: bytes = b"") -> None:
        message = Message(subject, reply, bytes(headers), bytes(data))
        size = self.check_size(message)
        if self._state is not ConnectionState.CONNECTED:
            self.drop(DropReason.DISCONNECTED)
            return
        self.send(partial(self._bus.accept, self, message), size)

    def subscribe(self, subject: str, callback: Callback, *, queue: str = "") -> MemorySubscription:
        if not subject or any(character.isspace() for character in subject + queue):
            raise ConfigError(f"{subject!r} with queue {queue!r} is not a subject")
        number = next(self._bus.numbers)
        subscription = MemorySubscription(self, number, subject, queue, callback)
        self._subscriptions[number] = subscription
        self.send(partial(self._bus.add, subscription))
        return subscription

    def remove(self, subscription: MemorySubscription) -> None:
        """Tell the server that a subscription has ended."""
        self._subscriptions.pop(subscription.number, None)
        self.send(partial(self._bus.remove, subscription))

    async def barrier(self, *, timeout: float = 5.0) -> None:
        def pong(answer: Callable[[None], None]) -> None:
            answer(None)

        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        return await self._ask(pong)
                    except ConnectionResetError:
                        continue
        except TimeoutError:
            raise Unavailable(f"the server did not answer a ping within {timeout} s") from None

    async def drained(self, *, timeout: float = 5.0) -> None:
        try:
            async with asyncio.timeout(timeout):
                while self._backlog > LOW_BACKLOG:
                    waiter: asyncio.Future[None] = self._loop.create_future()
                    self._flush_waiters.append(waiter)
                    await waiter
        except TimeoutError:
            raise Unavailable(f"the server took nothing for {timeout} s") from None

    async def request(
        self,
        message: Message,
        serve: Callable[[Callable[[T | DynbusError], None]], None],
        *,
        timeout: float,
    ) -> T:
        """Have `serve(answer)` run at the server, as if `message` had asked for it.

        Raises:
            Unavailable: no answer came in time, or the connection broke before it came.
            DynbusError: what it was answered with.
        """
        inbox = Message(f"{self.inbox}.{next(self._numbers)}", "", b"", b"")

        def ask(answer: Callable[[T | DynbusError], None]) -> None:
            # Both ways pass the faults: a request may be lost, and so may its answer.
            def disturbed(value: T | DynbusError) -> None:
                self._bus.disturb(inbox, partial(answer, value))

            self._bus.disturb(message, partial(serve, disturbed))

        try:
            async with asyncio.timeout(timeout):
                result = await self._ask(ask)
        except TimeoutError:
            raise Unavailable(f"{message.subject} did not answer within {timeout} s") from None
        except ConnectionResetError:
            raise Unavailable("the connection to the server broke") from None
        if isinstance(result, DynbusError):
            raise result
        return result

    def check_size(self, message: Message) -> int:
        """The bytes that count against `max_payload`.

        Raises:
            PayloadTooLarge: they are too many.
        """
        size = len(message.headers) + len(message.data)
        if size > self.max_payload:
            raise PayloadTooLarge(
                f"a message of {size} bytes to {message.subject} exceeds the server's "
                f"max_payload = {self.max_payload}"
            )
        return size

    async def close(self) -> None:
        if self._state is ConnectionState.CLOSED:
            return
        self._flush()
        self._end(ConnectionState.CLOSED)
        self._bus.leave(self)
        for subscription in self._subscriptions.values():
            subscription.active = False
        self._subscriptions.clear()

    # Faults ---------------------------------------------------------------------------

    def disconnect(self) -> None:
        """Break the connection until `reconnect`; what is under way in it is lost."""
        self._kept_away = True
        self.lose()

    def reconnect(self) -> None:
        """Let the connection reach its server again, when that runs."""
        self._kept_away = False
        self.restore()

    def partition(self, partitioned: bool) -> None:
        """Let the link carry nothing, or carry what it holds and all that follows."""
        self._partitioned = partitioned
        if not partitioned:
            self._schedule_flush()
            self._schedule_drain()

    def lose(self) -> None:
        """Break the connection once."""
        if self._state is ConnectionState.CONNECTED:
            self._end(ConnectionState.DISCONNECTED)

    def restore(self) -> None:
        """Connect again unless something still stands in the way."""
        if (
            self._state is not ConnectionState.DISCONNECTED
            or self._kept_away
            or self._partitioned
            or not self._bus.running
        ):
            return
        for subscription in self._subscriptions.values():
            self._bus.add(subscription)
        self._set_state(ConnectionState.CONNECTED)
        self._bus.jetstream.reattach(self)

    # The link -------------------------------------------------------------------------

    def send(self, command: Callable[[], None], size: int = 0) -> None:
        """Run `command` at the server in a later turn, after those sent before it."""
        if self._state is ConnectionState.CONNECTED:
            self._outbound.append((size, command))
            self._backlog += size
            self._schedule_flush()

    def deliver(self, delivery: Callable[[], None]) -> None:
        """Run `delivery` on this side in a later turn, after those sent before it."""
        if self._state is ConnectionState.CONNECTED:
            self._inbound.append(delivery)
            self._schedule_drain()

    def deliver_message(self, subscription: MemorySubscription, message: Message) -> None:
        self.deliver(partial(self._receive, subscription, message))

    def call(self, callback: Callable[[], None], what: str) -> None:
        """Run a callback of the library's; what it raises is logged."""
        try:
            callback()
        except Exception:
            logger.exception("the callback of %s raised", what)

    def _receive(self, subscription: MemorySubscription, message: Message) -> None:
        if not subscription.active:
            self.drop(DropReason.UNSUBSCRIBED)
            return
        self.call(partial(subscription.receive, message), subscription.subject)

    def _schedule_flush(self) -> None:
        if self._outbound and not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _schedule_drain(self) -> None:
        if self._inbound and not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._partitioned:
            return
        while self._outbound:
            size, command = self._outbound.popleft()
            self._backlog -= size
            command()
        self._release(self._flush_waiters)

    def _drain(self) -> None:
        self._drain_scheduled = False
        if self._partitioned:
            return
        for _ in range(len(self._inbound)):
            # A callback may break or close the connection, which loses the rest.
            if self._inbound:
                self._inbound.popleft()()
        self._schedule_drain()

    def _end(self, state: ConnectionState) -> None:
        self._outbound.clear()
        self._inbound.clear()
        self._backlog = 0
        self._bus.forget(self)
        self._release(self._flush_waiters)
        for future in self._answers:
            if not future.done():
                future.set_exception(ConnectionResetError())
                # Whoever waits may be cancelled in this very turn and never look.
                future.exception()
        self._answers.clear()
        self._set_state(state)

    async def _ask(self, serve: Callable[[Callable[[T], None]], None]) -> T:
        """What `serve` answers; ConnectionResetError when the connection breaks before."""
        await self.wait_connected()
        done: asyncio.Future[None] = self._loop.create_future()
        results: list[T] = []
        session = self.sessions

        def resolve(result: T) -> None:
            if not done.done():
                results.append(result)
                done.set_result(None)

        def answer(result: T) -> None:
            if self.sessions == session:
                self.deliver(partial(resolve, result))

        self._answers.add(done)
        self.send(partial(serve, answer))
        try:
            await done
        finally:
            self._answers.discard(done)
        return results[0]

    @staticmethod
    def _release(waiters: list[asyncio.Future[None]]) -> None:
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        waiters.clear()
