"""The bus without a server: `Connection` in one process, for tests.

`MemoryBus` stands for the server and `MemoryConnection` for a connection to it. Both do what
nats-server and its client do, one loop turn per hop, on the running loop's clock and with a
seeded random generator, so that on a `JumpingLoop` a run repeats exactly. What can go wrong
with a server can be made to go wrong here: see the faults of `MemoryBus`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeVar

import msgspec

from dynbus.bus.errors import DynbusError, Unavailable
from dynbus.bus.transport import Message, NoStream, StreamFull, WrongLastSequence

from .connection import MemoryConnection, MemorySubscription
from .faults import Delay, Drop, Duplicate, Fault, Partition
from .jetstream import JetStreamServer
from .subjects import SubjectTree

FaultT = TypeVar("FaultT", bound=Fault)

ERROR_NUMBERS: Final[dict[type[DynbusError], int]] = {WrongLastSequence: 10071, StreamFull: 10077}
"""What nats-server calls its refusals."""

DEFAULT_MAX_PAYLOAD: Final = 1024 * 1024
NOTICE_AFTER: Final = 6.0
"""Seconds after which unanswered pings tell a connection that its link is cut."""


class MemoryBus:
    """What a server is to its connections, and the faults that a server and a network have.

    A fault lasts until its `remove()`, its `count` or the end of its `with` block. Faults act
    on messages as they reach the server; requests to JetStream match as `$JS.API.>` or as
    the subject published to, their answers as the `inbox` of the connection.

    Args:
        seed: of every random choice.
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
        self, *connections: MemoryConnection, notice_after: float = NOTICE_AFTER
    ) -> Partition:
        """Carry nothing over the links of `connections`, whose state stays `CONNECTED` until
        they notice after `notice_after` seconds. What the links hold arrives when it ends
        before that, and is lost otherwise."""
        return Partition(connections, notice_after)

    def stop(self) -> None:
        """Kill the server: connections break, messages under way and streams in memory are
        lost, other streams are kept."""
        self.running = False
        for delay in self._delays:
            delay.lose_held()
        self.jetstream.lose_memory_streams()
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
        actions = [action]
        for fault in list(self._faults):
            if fault.matches(message):
                actions = fault.apply(actions)
        for remaining in actions:
            remaining()

    def store(self, message: Message, answer: Callable[[int | DynbusError], None]) -> None:
        """Carry out a publish that asks for an acknowledgement."""
        heard = self._fan_out(message)
        stream = self.jetstream.stream_of(message.subject)
        if stream is not None:
            if not (self.jetstream.stalled or stream.write_error):
                answer(self.jetstream.store(stream, message))
        elif not heard:
            answer(NoStream(f"no stream takes {message.subject}"))

    def _route(self, sender: MemoryConnection, message: Message) -> None:
        heard = self._fan_out(message)
        stream = self.jetstream.stream_of(message.subject)
        if stream is not None:
            if not (self.jetstream.stalled or stream.write_error):
                outcome = self.jetstream.store(stream, message)
                self._acknowledge(stream.config.name, message.reply, outcome)
        elif message.reply and not heard:
            self._bounce(sender, message)

    def _fan_out(self, message: Message) -> bool:
        groups: dict[str, list[MemorySubscription]] = {}
        matching = self._subscriptions.match(message.subject)
        for subscription in matching:
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
        self._fan_out(Message(reply, "", b"", msgspec.json.encode(answer)))

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


__all__ = ["MemoryBus", "MemoryConnection"]
