"""An instance on the in-memory bus, with a client that the test plays by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar

from dynbus.bus.bus import Bus
from dynbus.bus.config import load_config
from dynbus.bus.errors import DynbusError
from dynbus.bus.memory.bus import MemoryBus, MemoryConnection
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import EndpointName, control_subject
from dynbus.bus.protocol.wire import Batch, Frame, decode_batch, encode_batch
from dynbus.bus.serving.reply import CallReply
from dynbus.bus.serving.server import InstanceServer
from dynbus.bus.transport import Message

from .far_side import settle

F = TypeVar("F")

ADDRESS: Final = EndpointName("near", "Side", "call")
INSTANCE: Final = "i1"
INCARNATION: Final = "of-the-client"
BOUND: Final = 60.0
"""Virtual seconds within which everything here happens."""


def endpoint(invoke: Callable[..., Any], *, streaming: bool = False, **changes: Any) -> Endpoint:
    """An endpoint of bytes to bytes; `changes` are fields of it."""
    fields: dict[str, Any] = {
        "name": ADDRESS.endpoint,
        "streaming": streaming,
        "invoke": invoke,
        "decode": bytes,
        "encode": bytes,
        **changes,
    }
    return Endpoint(**fields)


def secret_of(number: int) -> bytes:
    """The secret that the client gives its request `number`."""
    return number.to_bytes(16, "big")


class PlayedClient:
    """A dynbus client that sends what the test wants and keeps what comes.

    Attributes:
        batches: what came to its frames subject.
        replies: what came to the reply subjects of its requests.
        control: frames that came to its control lane.
        askers: what the senders of those call themselves.
    """

    def __init__(self, connection: MemoryConnection, name: str = "c1") -> None:
        self.connection = connection
        self.base = f"_R.-.{name}"
        self.batches: list[Batch] = []
        self.replies: list[Message] = []
        self.control: list[Frame] = []
        self.askers: list[str] = []
        self._arrived = asyncio.Event()

    async def start(self) -> None:
        self.connection.subscribe(f"{self.base}.*", self._on_message)
        self.connection.subscribe(f"{self.base}.ctl.f", self._on_control)
        await self.connection.barrier()

    def send(
        self,
        number: int,
        data: bytes = b"",
        *,
        window: int = 1 << 20,
        framing: str | None = None,
        subject: str = "",
        **fields: str,
    ) -> None:
        """Publish a framed request; `fields` are further headers by their constants' names."""
        words = framing or f"1 {secret_of(number).hex()} {window} {INCARNATION}"
        named = {getattr(headers, name): text for name, text in fields.items()}
        block = headers.encode({headers.FRAMES: words, **named})
        self.connection.publish(
            subject or ADDRESS.at(INSTANCE), data, reply=f"{self.base}.{number}", headers=block
        )

    async def say(self, *frames: Frame) -> None:
        """Send control frames; they were read before this returns."""
        subject = control_subject(ADDRESS.namespace, ADDRESS.component, INSTANCE)
        self.connection.publish(subject, encode_batch(self.base, INCARNATION, 0, list(frames)))
        await settle(self.connection)

    def all(self, kind: type[F]) -> list[F]:
        """All result frames of a kind that have come."""
        return [
            frame for batch in self.batches for frame in batch.frames if isinstance(frame, kind)
        ]

    async def heard(self, kind: type[F], count: int = 1) -> list[F]:
        """All result frames of a kind, once there are so many."""
        async with asyncio.timeout(BOUND):
            while len(found := self.all(kind)) < count:
                await self._next()
        return found

    async def asked(self, kind: type[F], count: int = 1) -> list[F]:
        """All control frames of a kind, once there are so many."""
        async with asyncio.timeout(BOUND):
            while len(found := self._said(kind)) < count:
                await self._next()
        return found

    def _said(self, kind: type[F]) -> list[F]:
        return [frame for frame in self.control if isinstance(frame, kind)]

    async def reply(self) -> Message:
        """The first message at a reply subject, once it is there."""
        async with asyncio.timeout(BOUND):
            while not self.replies:
                await self._next()
        return self.replies[0]

    async def _next(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    def _on_message(self, message: Message) -> None:
        if message.subject == f"{self.base}.f":
            batch = decode_batch(message.data)
            assert batch is not None, message.data
            self.batches.append(batch)
        else:
            self.replies.append(message)
        self._arrived.set()

    def _on_control(self, message: Message) -> None:
        batch = decode_batch(message.data)
        assert batch is not None, message.data
        self.control += batch.frames
        self.askers += [batch.sender] * len(batch.frames)
        self._arrived.set()


class Served(NamedTuple):
    """An instance, and the client that calls it."""

    server: MemoryBus
    bus: Bus
    instance: InstanceServer
    client: PlayedClient


@asynccontextmanager
async def bus_in_memory(**settings: Any) -> AsyncGenerator[tuple[MemoryBus, Bus], None]:
    """A presence on an in-memory bus; `settings` are fields of `BusConfig`."""
    server = MemoryBus()
    config = load_config(settings, environment={})
    bus = await Bus.over(config, await server.connect(), await server.connect())
    try:
        yield server, bus
    finally:
        await bus.close()


@asynccontextmanager
async def serving(*endpoints: Endpoint, **settings: Any) -> AsyncGenerator[Served, None]:
    """An instance with these endpoints and one client; `settings` are those of the instance."""
    async with bus_in_memory(**settings) as (server, bus):
        instance = InstanceServer(bus, ADDRESS.component_name.instance(INSTANCE), endpoints)
        client = PlayedClient(await server.connect())
        await instance.start()
        await client.start()
        try:
            yield Served(server, bus, instance, client)
        finally:
            await instance.stop()
            await client.connection.close()


class RecordedReply(CallReply):
    """Results that go nowhere.

    Attributes:
        sent: the items, and the result of a unary call.
        is_blocked: whether the reader grants nothing.
    """

    __slots__ = ("is_blocked", "sent")

    def __init__(self, bus: Bus) -> None:
        now = asyncio.get_running_loop().time()
        super().__init__(bus, ADDRESS, ADDRESS.hop(INSTANCE), "r1", now)
        self.sent: list[bytes] = []
        self.is_blocked = False
        self.push = self._push

    @property
    def sent_items(self) -> int:
        return len(self.sent)

    def end(self, result: bytes | None = None) -> None:
        if not self.ended:
            if result is not None:
                self.sent.append(result)
            self._finish()

    def fail(self, error: DynbusError) -> None:
        if not self.ended:
            self.label(error)
            self.error = error
            self._finish()

    def _push(self, item: bytes) -> bool:
        self.sent.append(item)
        if self.is_blocked:
            self.pause()
        return not self.is_blocked


async def until(condition: Callable[[], object], *, turns: int = 1000) -> None:
    """Let the loop turn until a condition holds."""
    for _ in range(turns):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition does not come to hold")


def sizes(batches: Iterable[Batch]) -> list[int]:
    """How many frames each batch has."""
    return [len(batch.frames) for batch in batches]
