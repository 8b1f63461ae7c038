"""JetStream without a server.

`JetStreamServer` holds the streams of a `MemoryBus` and feeds their readers;
`MemoryJetStream` and `MemoryOrderedConsumer` are what a connection sees of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from . import headers as header_block
from .clock import unix_time
from .errors import ConfigError, DynbusError
from .memory_stream import EXPECTED, MESSAGE_ID, ROLLUP, TTL, MemoryStream
from .memory_subjects import overlap
from .transport import (
    Message,
    NoStream,
    StoredMessage,
    StreamConfig,
)

if TYPE_CHECKING:
    from .memory_connection import MemoryConnection

T = TypeVar("T")

CONSUME_TIMEOUT: Final = 5.0


class _Cursor:
    """How far the server has fed a reader since it was last started."""

    __slots__ = ("generation", "next_sequence", "reader", "stream")

    def __init__(
        self, reader: MemoryOrderedConsumer, stream: MemoryStream, generation: int
    ) -> None:
        self.reader = reader
        self.stream = stream
        self.generation = generation
        self.next_sequence = stream.last_sequence + 1


class JetStreamServer:
    """The streams of a bus and their readers.

    Attributes:
        stalled: while true nothing is stored, answered or delivered, as while a cluster has
            no leader; see `stall`.
    """

    def __init__(self) -> None:
        self.streams: dict[str, MemoryStream] = {}
        self.stalled = False
        self._readers: list[MemoryOrderedConsumer] = []
        self._cursors: dict[MemoryOrderedConsumer, _Cursor] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def stall(self, stalled: bool = True) -> None:
        """Stop answering, or answer again; core messages are not affected."""
        self.stalled = stalled
        if not stalled:
            for reader in self._readers:
                reader.restart()

    def stream_of(self, subject: str) -> MemoryStream | None:
        """The stream that stores messages of `subject`."""
        return next((stream for stream in self.streams.values() if stream.takes(subject)), None)

    def store(self, stream: MemoryStream, message: Message) -> int | DynbusError:
        """The sequence of a message once it is stored, or why it is not."""
        fields = header_block.decode(message.headers)
        now = asyncio.get_running_loop().time()
        try:
            return stream.store(now, unix_time(), message.subject, fields, message.data)
        except DynbusError as error:
            return error
        finally:
            self._changed(stream)

    def ensure(self, config: StreamConfig) -> None | DynbusError:
        known = self.streams.get(config.name)
        if known is not None:
            if known.config.subjects == config.subjects:
                return None
            return ConfigError(
                f"stream {config.name} exists with subjects "
                f"{', '.join(known.config.subjects)}; dynbus needs {', '.join(config.subjects)}"
            )
        for other in self.streams.values():
            if any(overlap(one, two) for one in other.config.subjects for two in config.subjects):
                return ConfigError(
                    f"stream {config.name}: subjects overlap with those of {other.config.name}"
                )
        self.streams[config.name] = MemoryStream(config)
        for reader in list(self._readers):
            if reader.stream == config.name:
                reader.restart()
        return None

    def delete(self, name: str) -> None:
        self.streams.pop(name, None)
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        for reader, cursor in list(self._cursors.items()):
            if cursor.stream.config.name == name:
                del self._cursors[reader]

    def last(self, name: str, subject: str) -> StoredMessage | None | DynbusError:
        stream = self.streams.get(name)
        return NoStream(f"stream {name} not found") if stream is None else stream.last(subject)

    def message_count(self, name: str) -> int | DynbusError:
        stream = self.streams.get(name)
        return NoStream(f"stream {name} not found") if stream is None else stream.message_count

    def lose_memory_streams(self) -> None:
        """Delete what does not survive a restart of the server."""
        for name in [name for name, stream in self.streams.items() if stream.config.in_memory]:
            self.delete(name)

    def attach(self, reader: MemoryOrderedConsumer) -> None | NoStream:
        """Feed a reader from where it is, from the next turn on."""
        stream = self.streams.get(reader.stream)
        if stream is None:
            return NoStream(f"stream {reader.stream} not found")
        if reader not in self._readers:
            self._readers.append(reader)
        # A reader may be ahead of a stream that was deleted and made again.
        start = min(reader.next_sequence, stream.last_sequence + 1)
        reader.generation += 1
        cursor = self._cursors[reader] = _Cursor(reader, stream, reader.generation)
        if reader.last_per_subject:
            self._feed(cursor, stream.last_of_each(reader.pattern))
        else:
            self._feed(cursor, stream.after(start, reader.pattern))
        reader.connection.deliver(partial(reader.caught_up, reader.generation))
        return None

    def detach(self, connection: MemoryConnection) -> None:
        """Stop feeding the readers of a connection."""
        for reader in list(self._cursors):
            if reader.connection is connection:
                del self._cursors[reader]

    def reattach(self, connection: MemoryConnection) -> None:
        """Start the readers of a connection that is back."""
        for reader in self._readers:
            if reader.connection is connection:
                reader.restart()

    def remove(self, reader: MemoryOrderedConsumer) -> None:
        """Forget a reader."""
        self._cursors.pop(reader, None)
        if reader in self._readers:
            self._readers.remove(reader)

    def _changed(self, stream: MemoryStream) -> None:
        if not self.stalled:
            for cursor in list(self._cursors.values()):
                if cursor.stream is stream:
                    self._feed(cursor, stream.after(cursor.next_sequence, cursor.reader.pattern))
                    cursor.next_sequence = stream.last_sequence + 1
        name = stream.config.name
        due = stream.next_expiry()
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        if due is not None:
            loop = asyncio.get_running_loop()
            self._timers[name] = loop.call_at(due, self._expire, stream)

    def _expire(self, stream: MemoryStream) -> None:
        # A timer may fire a clock tick early.
        due = stream.next_expiry() or 0.0
        stream.expire(max(asyncio.get_running_loop().time(), due), unix_time())
        self._changed(stream)

    def _feed(self, cursor: _Cursor, sequences: list[int]) -> None:
        for place, sequence in enumerate(sequences, 1):
            message = cursor.stream.get(sequence)._replace(pending=len(sequences) - place)
            cursor.reader.connection.deliver(
                partial(cursor.reader.receive, message, cursor.generation)
            )


class MemoryJetStream:
    """The JetStream API as one connection sees it."""

    def __init__(
        self,
        connection: MemoryConnection,
        server: JetStreamServer,
        store: Callable[[Message, Callable[[int | DynbusError], None]], None],
    ) -> None:
        self._connection = connection
        self._server = server
        self._store = store

    async def ensure_stream(self, config: StreamConfig, *, timeout: float = 5.0) -> None:
        call = f"STREAM.CREATE.{config.name}"
        await self._api(call, partial(self._server.ensure, config), timeout)

    async def delete_stream(self, name: str, *, timeout: float = 5.0) -> None:
        await self._api(f"STREAM.DELETE.{name}", partial(self._server.delete, name), timeout)

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        message_id: str = "",
        expected_last_subject_sequence: int | None = None,
        ttl: float | None = None,
        rollup: bool = False,
        headers: Mapping[str, str] | None = None,
        timeout: float = 5.0,
    ) -> int:
        fields = dict(headers or {})
        if message_id:
            fields[MESSAGE_ID] = message_id
        if expected_last_subject_sequence is not None:
            fields[EXPECTED] = str(expected_last_subject_sequence)
        if ttl is not None:
            fields[TTL] = f"{max(1, round(ttl))}s"
        if rollup:
            fields[ROLLUP] = "sub"
        block = header_block.encode(fields) if fields else b""
        message = Message(subject, "", block, bytes(data))
        self._connection.check_size(message)
        return await self._connection.request(
            message, partial(self._store, message), timeout=timeout
        )

    async def last(
        self, stream: str, subject: str, *, timeout: float = 5.0
    ) -> StoredMessage | None:
        call = f"STREAM.MSG.GET.{stream}"
        return await self._api(call, partial(self._server.last, stream, subject), timeout)

    async def message_count(self, stream: str, *, timeout: float = 5.0) -> int:
        call = f"STREAM.INFO.{stream}"
        return await self._api(call, partial(self._server.message_count, stream), timeout)

    async def consume(
        self,
        stream: str,
        on_message: Callable[[StoredMessage], None],
        *,
        subject: str = "",
        start_sequence: int = 1,
        last_per_subject: bool = False,
        on_restart: Callable[[], None] | None = None,
        on_caught_up: Callable[[], None] | None = None,
    ) -> MemoryOrderedConsumer:
        reader = MemoryOrderedConsumer(
            self._connection,
            self._server,
            stream,
            on_message,
            pattern=subject or ">",
            next_sequence=max(1, start_sequence),
            last_per_subject=last_per_subject,
            on_restart=on_restart,
            on_caught_up=on_caught_up,
        )
        call = f"CONSUMER.CREATE.{stream}"
        try:
            await self._api(call, partial(self._server.attach, reader), CONSUME_TIMEOUT)
        except BaseException:
            # The request may have been carried out all the same.
            await reader.stop()
            raise
        return reader

    async def _api(self, call: str, act: Callable[[], T | DynbusError], timeout: float) -> T:
        def serve(answer: Callable[[T | DynbusError], None]) -> None:
            if not self._server.stalled:
                answer(act())

        message = Message(f"$JS.API.{call}", "", b"", b"")
        return await self._connection.request(message, serve, timeout=timeout)


class MemoryOrderedConsumer:
    """Reads a stream in order; the connection and the server start it over."""

    def __init__(
        self,
        connection: MemoryConnection,
        server: JetStreamServer,
        stream: str,
        on_message: Callable[[StoredMessage], None],
        *,
        pattern: str,
        next_sequence: int,
        last_per_subject: bool,
        on_restart: Callable[[], None] | None,
        on_caught_up: Callable[[], None] | None,
    ) -> None:
        self.connection = connection
        self.stream = stream
        self.pattern = pattern
        self.next_sequence = next_sequence
        self.last_per_subject = last_per_subject
        self.generation = 0
        self._server = server
        self._on_message = on_message
        self._on_restart = on_restart
        self._on_caught_up = on_caught_up
        self._stopped = False

    async def stop(self) -> None:
        self._stopped = True
        self._server.remove(self)

    def restart(self) -> None:
        """Have the server feed it anew, in later turns."""
        if not self._stopped:
            self.connection.send(self._attach)

    def receive(self, message: StoredMessage, generation: int) -> None:
        """Take a delivery; one from before the last start comes again and is left out."""
        if not self._stopped and generation == self.generation:
            self.next_sequence = message.sequence + 1
            self.connection.call(partial(self._on_message, message), self.stream)

    def caught_up(self, generation: int) -> None:
        """Take note that all that the stream held at the last start was delivered."""
        if self._on_caught_up is not None and not self._stopped and generation == self.generation:
            self.connection.call(self._on_caught_up, self.stream)

    def _attach(self) -> None:
        if self._stopped or self._server.stalled or self.stream not in self._server.streams:
            return
        if self.last_per_subject and self._on_restart is not None:
            self.connection.deliver(partial(self._announce, self._on_restart))
        self._server.attach(self)

    def _announce(self, on_restart: Callable[[], None]) -> None:
        if not self._stopped:
            self.connection.call(on_restart, self.stream)
