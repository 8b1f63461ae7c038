"""A caller with an instance that the test plays by hand, on the in-memory bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from dynbus.bus.bus import Bus
from dynbus.bus.calling.caller import Caller
from dynbus.bus.calling.pending_call import CallHead, PendingCall
from dynbus.bus.clock import monotonic
from dynbus.bus.config import load_config
from dynbus.bus.memory.bus import MemoryBus, MemoryConnection, MemorySubscription
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import EndpointName, control_subject, split_number
from dynbus.bus.protocol.wire import Frame, Heartbeat, decode_batch, encode_batch
from dynbus.bus.transport import Message

F = TypeVar("F")

ENDPOINT: Final = EndpointName("played", "FarSide", "call")
BOUND: Final = 60.0
"""Virtual seconds within which everything here happens."""


class Request(NamedTuple):
    """A request, or one part of it, as the instance gets it."""

    base: str
    number: int
    secret: bytes
    window: int
    incarnation: str
    fields: Mapping[str, str]
    data: bytes


class FarSide:
    """An instance that keeps what it is sent, and sends what the test wants.

    Attributes:
        requests: the messages of requests.
        frames: what came to its control lane.
        control_messages: in how many messages.
    """

    def __init__(self, connection: MemoryConnection, instance_id: str) -> None:
        self.connection = connection
        self.instance_id = instance_id
        self.requests: list[Request] = []
        self.frames: list[Frame] = []
        self.control_messages = 0
        self._subscriptions: list[MemorySubscription] = []
        self._arrived = asyncio.Event()

    async def start(self) -> None:
        control = control_subject(ENDPOINT.namespace, ENDPOINT.component, self.instance_id)
        subscribe = self.connection.subscribe
        self._subscriptions = [
            subscribe(ENDPOINT.at(self.instance_id), self._on_request),
            subscribe(control, self._on_control),
        ]
        await self.connection.barrier()

    async def leave(self) -> None:
        """Hear nothing any more."""
        for subscription in self._subscriptions:
            subscription.unsubscribe()
        await self.connection.barrier()

    async def request(self, count: int = 1) -> Request:
        """The request of this number, once it is there."""
        async with asyncio.timeout(BOUND):
            while len(self.requests) < count:
                await self._next()
        return self.requests[count - 1]

    async def heard(self, kind: type[F], count: int = 1) -> list[F]:
        """All frames of a kind, once there are so many."""
        async with asyncio.timeout(BOUND):
            while len(found := self.all(kind)) < count:
                await self._next()
        return found

    def all(self, kind: type[F]) -> list[F]:
        """All frames of a kind that have come."""
        return [frame for frame in self.frames if isinstance(frame, kind)]

    async def send(self, *frames: Frame, load: int = 0) -> None:
        """Send result frames to the caller of the first request; they arrive before it returns."""
        await self._publish(f"{(await self.request()).base}.f", load, *frames)

    async def send_control(self, *frames: Frame) -> None:
        """Send control frames to the caller of the first request."""
        await self._publish(f"{(await self.request()).base}.ctl.f", 0, *frames)

    async def beat(self, sent: int = 0, blocked: float = 0.0, number: int = 1) -> None:
        """Send a heartbeat that says for every request that `sent` units were sent."""
        calls = [(request.number, sent) for request in self.requests]
        await self.send_control(Heartbeat(number, blocked, False, calls))

    async def _publish(self, subject: str, load: int, *frames: Frame) -> None:
        incarnation = self.requests[0].incarnation
        batch = encode_batch(self.instance_id, incarnation, load, list(frames))
        self.connection.publish(subject, batch)
        await settle(self.connection)

    async def _next(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    def _on_request(self, message: Message) -> None:
        fields = headers.decode(message.headers)
        _, secret, window, incarnation = fields[headers.FRAMES].split()
        reply = split_number(message.reply)
        assert reply is not None, message.reply
        base, number = reply
        self.requests.append(
            Request(
                base, number, bytes.fromhex(secret), int(window), incarnation, fields, message.data
            )
        )
        self._arrived.set()

    def _on_control(self, message: Message) -> None:
        batch = decode_batch(message.data)
        assert batch is not None, message.data
        self.frames += batch.frames
        self.control_messages += 1
        self._arrived.set()


class Played(NamedTuple):
    """A caller, and the instance that it calls."""

    server: MemoryBus
    bus: Bus
    caller: Caller
    far: FarSide

    def begin(self, data: bytes = b"", *, instance_id: str = "", **changes: Any) -> PendingCall:
        """Send a request; `changes` are fields of its head."""
        head = CallHead(ENDPOINT, "request-1", monotonic() + 30.0, 1, False, {})
        return self.caller.begin(
            msgspec.structs.replace(head, **changes), instance_id or self.far.instance_id, data
        )


@asynccontextmanager
async def played(server: MemoryBus | None = None, **settings: Any) -> AsyncGenerator[Played, None]:
    """A caller and an instance on one in-memory bus; `settings` are those of the caller."""
    server = server or MemoryBus()
    config = load_config(settings, environment={})
    bus = await Bus.over(config, await server.connect(), await server.connect())
    caller = Caller(bus)
    await caller.start()
    far = FarSide(await server.connect(), "one")
    await far.start()
    try:
        yield Played(server, bus, caller, far)
    finally:
        await caller.close()
        await bus.close()
        await far.connection.close()


async def settle(connection: MemoryConnection) -> None:
    """Wait until what was published on a connection has been delivered everywhere."""
    await connection.barrier()
    # One turn to the receiving connection, one for what its callbacks call soon.
    for _ in range(4):
        await asyncio.sleep(0)
