"""The bus without a server: `Connection` in one process, for tests.

`MemoryBus` stands for the server and `MemoryConnection` for a connection to it. Both do what
nats-server and its client do, one loop turn per hop, on the running loop's clock and with a
seeded random generator, so that on a `JumpingLoop` a run repeats exactly. What can go wrong
with a server can be made to go wrong here: see the faults of `MemoryBus`.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

import msgspec

from dynbus.bus.drops import DropReason
from dynbus.bus.errors import ConfigError, DynbusError, PayloadTooLarge, Unavailable
from dynbus.bus.transport import (
    Callback,
    ConnectionState,
    Message,
    NoStream,
    StreamFull,
    SubjectTaken,
    WatchedConnection,
    WrongLastSequence,
)

from .faults import Delay, Drop, Duplicate, Fault, Partition, Split
from .jetstream import JetStreamServer, MemoryJetStream
from .subjects import SubjectTree

T = TypeVar("T")
FaultT = TypeVar("FaultT", bound=Fault)

logger = logging.getLogger(__name__)

ERROR_NUMBERS: Final[dict[type[DynbusError], int]] = {
    WrongLastSequence: 10071,
    StreamFull: 10077,
    SubjectTaken: 10077,
}
"""nats-server's numbers of its refusals."""

DEFAULT_MAX_PAYLOAD: Final = 1024 * 1024
LOW_BACKLOG: Final = 1024 * 1024
NOTICE_AFTER: Final = 6.0
"""Seconds after which unanswered pings tell a connection that its link is cut."""


class MemoryBus:
    """The server of connections in memory, and the faults that a server and a network have.

    A fault lasts until its `remove()`, its `count` or the end of its `with` block. Faults act
    on messages as they reach the server; requests to JetStream match as `$JS.API.>` or as
    the subject published to, their answers as the `inbox` of the connection.

    Args:
        seed: of every random choice.

    Attributes:
        observers: called with each message, request and answer as it reaches the server, before
            the faults act on it.
        is_cluster: whether there is a second server, so that the bus can be split.
    """

    def __init__(
        self, *, seed: int = 0, max_payload: int = DEFAULT_MAX_PAYLOAD, name: str = "memory"
    ) -> None:
        self.name = name
        self.max_payload = max_payload
        self.random = random.Random(seed)
        self.running = True
        self.connections: list[MemoryConnection] = []
        self.numbers: Iterator[int] = itertools.count(1)
        self.jetstream = JetStreamServer()
        self.observers: list[Callable[[Message], None]] = []
        self.is_cluster = False
        self._split: Split[MemoryConnection] | None = None
        self._subscriptions: SubjectTree[MemorySubscription] = SubjectTree()
        self._faults: list[Fault] = []
        self._delays: list[Delay] = []

    def __repr__(self) -> str:
        state = "running" if self.running else "stopped"
        return (
            f"<MemoryBus {self.name} [{state} | connections: {len(self.connections)}, "
            f"streams: {len(self.jetstream.streams)}, faults: {len(self._faults)}]>"
        )

    async def connect(self, *, name: str = "dynbus") -> MemoryConnection:
        """Open a connection on the running loop.

        Raises:
            Unavailable: the bus is stopped.
        """
        if not self.running:
            raise Unavailable(f"no NATS server can be reached ({self.name} is stopped)")
        connection = MemoryConnection(self, name, next(self.numbers))
        self.connections.append(connection)
        return connection

    # Faults ---------------------------------------------------------------------------

    def delay(self, pattern: str, seconds: float) -> Delay:
        """Hold messages of matching subjects for a while; their order is kept."""
        delay = self._add_fault(Delay(self._faults, pattern, seconds))
        self._delays.append(delay)
        return delay

    def drop(
        self,
        pattern: str,
        count: int | None = None,
        *,
        when: Callable[[Message], bool] | None = None,
    ) -> Drop:
        """Lose the next `count` messages of matching subjects, or all of them."""
        return self._add_fault(Drop(self._faults, pattern, count, when))

    def duplicate(
        self,
        pattern: str,
        count: int | None = None,
        *,
        when: Callable[[Message], bool] | None = None,
    ) -> Duplicate:
        """Carry out the next `count` messages of matching subjects twice, or all of them."""
        return self._add_fault(Duplicate(self._faults, pattern, count, when))

    def partition(
        self,
        *connections: MemoryConnection,
        notice_after: float = NOTICE_AFTER,
        arrives_late: bool = False,
    ) -> Partition:
        """Carry nothing over the links of `connections`, whose state stays `CONNECTED` until
        they notice after `notice_after` seconds. What the links hold arrives when it ends
        before that, and is lost otherwise.

        Args:
            arrives_late: they leave their links when they notice, and are connected anew by others;
                what was sent over the old ones arrives when it ends.
        """
        return Partition(connections, notice_after, arrives_late=arrives_late)

    def split(
        self,
        first: Sequence[Sequence[MemoryConnection]],
        second: Sequence[Sequence[MemoryConnection]],
    ) -> Split[MemoryConnection]:
        """Have connections be at two servers, which lose each other without noticing, and of which
        the second has no JetStream then.

        Args:
            first, second: the connections there, by groups: those of one leave together, when one
                of them is told to.

        Raises:
            RuntimeError: it is split already, or no cluster.
        """
        if self.is_split or not self.is_cluster:
            raise RuntimeError("the bus is split already, or has one server: see `is_cluster`")
        self._split = Split(first, second, self.jetstream.detach)
        return self._split

    def stop(self, *, keep_disk: bool = True) -> None:
        """Kill the server: connections break, messages under way and streams in memory are
        lost, other streams are kept unless its disk is lost too."""
        self.running = False
        for delay in self._delays:
            delay.lose_held()
        self.jetstream.lose_streams(in_memory_only=keep_disk)
        for connection in list(self.connections):
            connection.lose()

    def start(self) -> None:
        """Start the server again: connections come back in random order in later turns."""
        self.running = True
        connections = list(self.connections)
        self.random.shuffle(connections)
        for connection in connections:
            asyncio.get_running_loop().call_soon(connection.restore)

    def _add_fault(self, fault: FaultT) -> FaultT:
        self._faults.append(fault)
        return fault

    # The server -----------------------------------------------------------------------

    def add(self, subscription: MemorySubscription) -> None:
        """Take up a subscription."""
        if subscription.active:
            self._subscriptions.add(subscription.subject, subscription.number, subscription)

    def remove(self, subscription: MemorySubscription) -> None:
        """Drop a subscription."""
        self._subscriptions.remove(subscription.subject, subscription.number)

    def forget(self, connection: MemoryConnection) -> None:
        """Drop all that a connection which is gone had here."""
        for subscription in self._subscriptions.values():
            if subscription.connection is connection:
                self.remove(subscription)
        self.jetstream.detach(connection)

    def leave(self, connection: MemoryConnection) -> None:
        """Count a connection no longer."""
        self.connections.remove(connection)

    def accept(self, sender: MemoryConnection, message: Message) -> None:
        """Carry out a publish."""
        self.disturb(message, partial(self._route, sender, message))

    def disturb(self, message: Message, action: Callable[[], None]) -> None:
        """Carry out `action`, the arrival of `message`, as the faults want it."""
        for observe in self.observers:
            observe(message)
        actions = [action]
        for fault in list(self._faults):
            if fault.matches(message):
                actions = fault.apply(actions)
        for remaining in actions:
            remaining()

    def store(
        self,
        sender: MemoryConnection,
        message: Message,
        answer: Callable[[int | DynbusError], None],
    ) -> None:
        """Carry out a publish that asks for an acknowledgement."""
        heard = self._fan_out(sender, message)
        stream = self.jetstream.stream_of(message.subject)
        if stream is not None:
            if not (self.jetstream.stalled or stream.write_error or self.is_apart(sender)):
                answer(self.jetstream.store(stream, message))
        elif not heard:
            answer(NoStream(f"no stream takes {message.subject}"))

    def _route(self, sender: MemoryConnection, message: Message) -> None:
        heard = self._fan_out(sender, message)
        stream = self.jetstream.stream_of(message.subject)
        if stream is not None:
            if not (self.jetstream.stalled or stream.write_error or self.is_apart(sender)):
                outcome = self.jetstream.store(stream, message)
                self._acknowledge(stream.config.name, message.reply, outcome)
        elif message.reply and not heard:
            self._bounce(sender, message)

    @property
    def is_split(self) -> bool:
        """True if connections are at a second server, which has lost the first."""
        return self._split is not None and not self._split.is_over

    def is_apart(self, connection: MemoryConnection) -> bool:
        """True if a connection is at the server that has lost the first."""
        return self._split is not None and self._split.has(connection)

    def leave_server(self, connection: MemoryConnection) -> None:
        """Have a connection go to the other server, with its group, where the bus is split."""
        if self._split is not None and not self._split.is_over:
            self._split.leave(connection)

    def _fan_out(self, sender: MemoryConnection | None, message: Message) -> bool:
        """Deliver a message; True when anybody hears it, or would at a server that was lost.

        Args:
            sender: None for the server.
        """
        groups: dict[str, list[MemorySubscription]] = {}
        matching = self._subscriptions.match(message.subject)
        if self.is_split:
            side = sender is not None and self.is_apart(sender)
            there = [one for one in matching if self.is_apart(one.connection) is side]
        else:
            there = matching
        for subscription in there:
            if subscription.queue:
                groups.setdefault(subscription.queue, []).append(subscription)
            else:
                subscription.connection.deliver_message(subscription, message)
        for members in groups.values():
            member = self.random.choice(members)
            member.connection.deliver_message(member, message)
        return bool(matching)

    def _acknowledge(self, stream: str, reply: str, outcome: int | DynbusError) -> None:
        if not reply:
            return
        answer: dict[str, object]
        if isinstance(outcome, int):
            answer = {"stream": stream, "seq": outcome}
        else:
            number = ERROR_NUMBERS.get(type(outcome), 0)
            error = {"code": 400, "err_code": number, "description": str(outcome)}
            answer = {"error": error, "stream": stream, "seq": 0}
        self._fan_out(None, Message(reply, "", b"", msgspec.json.encode(answer)))

    def _bounce(self, sender: MemoryConnection, message: Message) -> None:
        """Tell the sender that nobody heard it, if it listens to its own reply subject.

        nats-server tells nobody else, even when another connection listens there.
        """
        own = [
            subscription
            for subscription in self._subscriptions.match(message.reply)
            if subscription.connection is sender
        ]
        own.sort(key=lambda subscription: bool(subscription.queue))
        if own:
            block = f"NATS/1.0 503\r\nNats-Subject: {message.subject}\r\n\r\n".encode()
            sender.deliver_message(own[0], Message(message.reply, "", block, b""))


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
    """A connection to a `MemoryBus`; made by `MemoryBus.connect`.

    Attributes:
        way: draws the seconds that the next messages take in either direction, in their order; None
            where they take a turn of the loop.
    """

    def __init__(self, bus: MemoryBus, name: str, number: int) -> None:
        super().__init__(name, ConnectionState.CONNECTED)
        self.inbox = f"_INBOX.{number}"
        self.way: Callable[[], float] | None = None
        self._bus = bus
        # Of the process that has it: what arrives runs as that, and not as its sender.
        self._context = contextvars.copy_context()
        self._kept_away = False
        self._partitioned = False
        self._deaf = False
        self._subscriptions: dict[int, MemorySubscription] = {}
        self._outbound: deque[tuple[int, Callable[[], None]]] = deque()
        self._inbound: deque[Callable[[], None]] = deque()
        self._backlog = 0
        self._flush_scheduled = False
        self._drain_scheduled = False
        self._flush_waiters: list[asyncio.Future[None]] = []
        self._answers: set[asyncio.Future[None]] = set()
        self._numbers = itertools.count(1)
        self._jetstream = MemoryJetStream(self, bus.jetstream, partial(bus.store, self))

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
    def round_trip(self) -> float:
        return 0.0

    @property
    def server_name(self) -> str:
        return self._bus.name

    @property
    def region(self) -> str:
        """In memory there is one region, without a name."""
        return ""

    @property
    def jetstream(self) -> MemoryJetStream:
        return self._jetstream

    @property
    def has_peers(self) -> bool:
        return self._bus.is_cluster

    def on_peer_lost(self, listener: Callable[[], None]) -> None:
        """In memory no server notices that it has lost another, so `listener` is never called."""

    def leave_server(self, why: str) -> None:
        """In memory there is no other server, unless the bus is split."""
        self._bus.leave_server(self)

    def on_error(self, listener: Callable[[DynbusError, str], None]) -> None:
        """In memory no subject is refused, so `listener` is never called."""

    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: bytes = b"") -> None:
        message = Message(subject, reply, bytes(headers), bytes(data))
        size = self.check_size(message)
        if self._state is not ConnectionState.CONNECTED:
            self.drop(DropReason.DISCONNECTED)
            return
        self.send(partial(self._bus.accept, self, message), size)

    def before_sending(self, publish: Callable[[], object]) -> None:
        self._loop.call_soon(publish)

    def send_now(self) -> None:
        """In memory nothing waits for the end of the turn."""

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

            if not self._bus.is_apart(self):
                self._bus.disturb(message, partial(serve, disturbed))

        try:
            async with asyncio.timeout(timeout):
                result = await self._ask(ask)
        except TimeoutError:
            raise Unavailable(f"{message.subject} did not answer within {timeout:.1f} s") from None
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

    def deafen(self, deaf: bool) -> None:
        """Let nothing come over the link, while what is sent goes, or let come what it holds."""
        self._deaf = deaf
        if not deaf:
            self._schedule_drain()

    def take_unsent(self) -> list[Callable[[], None]]:
        """Take away what is on its way to the server, in its order."""
        unsent = [command for _, command in self._outbound]
        self._outbound.clear()
        self._backlog = 0
        return unsent

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
        self._context.copy().run(self._set_state, ConnectionState.CONNECTED)
        if not self._bus.is_apart(self):
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
            self._soon(self._flush)

    def _schedule_drain(self) -> None:
        if self._inbound and not self._drain_scheduled:
            self._drain_scheduled = True
            self._soon(self._drain)

    def _soon(self, transfer: Callable[[], None]) -> None:
        seconds = 0.0 if self.way is None else self.way()
        if seconds > 0:
            self._loop.call_later(seconds, transfer, context=self._context)
        else:
            self._loop.call_soon(transfer, context=self._context)

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
        if self._partitioned or self._deaf:
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
                # The waiting caller may be cancelled in this very turn and never look.
                future.exception()
        self._answers.clear()
        self._context.copy().run(self._set_state, state)

    async def _ask(self, serve: Callable[[Callable[[T], None]], None]) -> T:
        """The answer of `serve`; ConnectionResetError when the connection breaks before."""
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
