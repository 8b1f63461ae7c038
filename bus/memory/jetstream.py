"""JetStream without a server.

`JetStreamServer` holds the streams of a `MemoryBus` and feeds their readers, which are
`MemoryOrderedConsumer`s and, of work queues, `MemoryPullReader`s; `MemoryJetStream` is what a
connection sees of it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar, Unpack

from dynbus.bus.clock import unix_time
from dynbus.bus.errors import ConfigError, DynbusError, Unavailable
from dynbus.bus.protocol import headers as header_block
from dynbus.bus.transport import (
    AckKind,
    ConsumeOptions,
    ConsumerInfo,
    Delivery,
    Message,
    NoStream,
    PublishOptions,
    PullConsumerConfig,
    StoredMessage,
    StreamConfig,
    StreamInfo,
    ack_payload,
    publish_headers,
)

from .pull_consumer import MemoryPullConsumer, MemoryPullReader, ReaderLink
from .stream import MemoryStream
from .subjects import overlap

T = TypeVar("T")

CONSUME_TIMEOUT: Final = 5.0
PAGE: Final = 1000
CLOCK_STEP: Final = 1e-6


class MemoryLink(ReaderLink, Protocol):
    """The connection over which JetStream is used."""

    @property
    def max_payload(self) -> int: ...
    def check_size(self, message: Message) -> int: ...
    async def request(
        self,
        message: Message,
        serve: Callable[[Callable[[T | DynbusError], None]], None],
        *,
        timeout: float,
    ) -> T: ...


class MemoryOrderedConsumer:
    """Reads a stream in order; the connection and the server start it over.

    Attributes:
        generation: how often the server has begun to feed it; what an earlier start still
            delivers is left out.
    """

    def __init__(
        self,
        connection: MemoryLink,
        server: JetStreamServer,
        stream: str,
        on_message: Callable[[StoredMessage], None],
        options: ConsumeOptions,
    ) -> None:
        self.connection = connection
        self.stream = stream
        self.pattern = options.get("subject") or ">"
        self.next_sequence = max(1, options.get("start_sequence", 1))
        self.last_per_subject = options.get("last_per_subject", False)
        self.generation = 0
        self._server = server
        self._created = options.get("created")
        self._at_least = options.get("at_least", 0)
        self._waits = False
        self._on_message = on_message
        self._on_restart = options.get("on_restart")
        self._on_recreated = options.get("on_recreated")
        self._on_caught_up = options.get("on_caught_up")
        self._begun = False
        self._stopped = False

    def __repr__(self) -> str:
        return f"<MemoryOrderedConsumer {self.stream} [next: {self.next_sequence}]>"

    async def stop(self) -> None:
        self._stopped = True
        self._server.remove(self)

    def restart(self) -> None:
        """Have the server feed it anew, in later turns."""
        if not self._stopped:
            self.connection.send(self._attach)

    def start_of(self, created: float) -> int:
        """The first sequence that it wants of a stream made at `created`."""
        return 1 if self._created not in (None, created) else self.next_sequence

    def begin(self, created: float, generation: int) -> None:
        """Take note of a start, before all that is delivered after it."""
        if self._stopped or generation != self.generation:
            return
        if self._created not in (None, created):
            self.next_sequence = 1
            self._at_least = 0
            self._call(self._on_recreated)
        self._created = created
        if self._begun and self.last_per_subject:
            self._call(self._on_restart)
        self._begun = True

    def receive(self, message: StoredMessage, generation: int) -> None:
        """Take a delivery."""
        if not self._stopped and generation == self.generation:
            self.next_sequence = message.sequence + 1
            self._call(partial(self._on_message, message))
            if self._waits:
                self.caught_up(generation)

    def caught_up(self, generation: int) -> None:
        """Take note that all that the stream held at the last start was delivered."""
        if not self._stopped and generation == self.generation:
            self._waits = self.next_sequence <= self._at_least
            if not self._waits:
                self._call(self._on_caught_up)

    def _call(self, callback: Callable[[], None] | None) -> None:
        if callback is not None:
            self.connection.call(callback, self.stream)

    def _attach(self) -> None:
        if not (self._stopped or self._server.stalled):
            # While its stream is missing it waits to be started when that is made.
            self._server.attach(self)


class _Cursor:
    """The position to which the server has fed a reader since it was last started."""

    __slots__ = ("generation", "next_sequence", "reader", "stream")

    def __init__(
        self, reader: MemoryOrderedConsumer, stream: MemoryStream, next_sequence: int
    ) -> None:
        self.reader = reader
        self.stream = stream
        self.generation = reader.generation
        self.next_sequence = next_sequence


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
        self._pull_consumers: dict[tuple[str, str], MemoryPullConsumer] = {}
        self._pull_readers: list[MemoryPullReader] = []
        self._timers: dict[str, asyncio.TimerHandle] = {}
        # A timer has that of the server: what a client has set off goes on without the client.
        self._context = contextvars.copy_context()
        self._last_created = 0.0

    def stall(self, stalled: bool = True) -> None:
        """Stop answering, or answer again; core messages are not affected."""
        self.stalled = stalled
        if not stalled:
            for reader in self._readers:
                reader.restart()
            for puller in self._pull_readers:
                puller.restart()

    def break_store(self, name: str, reason: str) -> None:
        """Have a stream take nothing any more, as nats-server does after a full disk; "" mends
        it, as does making the stream again."""
        self.streams[name].write_error = reason

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

    def has(self, config: StreamConfig) -> bool | DynbusError:
        """True if there is this stream, False if there is none of its name; the error if there is
        another one of its name.
        """
        known = self.streams.get(config.name)
        if known is None:
            return False
        if known.config.work_queue != config.work_queue:
            return ConfigError(f"stream {config.name} exists with another retention")
        if known.config.subjects != config.subjects:
            return ConfigError(
                f"stream {config.name} exists with subjects = "
                f"{', '.join(known.config.subjects)}, not {', '.join(config.subjects)}"
            )
        if known.config.lanes != config.lanes:
            return ConfigError(
                f"stream {config.name} exists with {known.config.lanes} lanes, not {config.lanes}"
            )
        return True

    def ensure(self, config: StreamConfig) -> None | DynbusError:
        exists = self.has(config)
        if isinstance(exists, DynbusError):
            return exists
        if exists:
            return None
        for other in self.streams.values():
            if any(overlap(one, two) for one in other.config.subjects for two in config.subjects):
                return ConfigError(
                    f"stream {config.name}: subjects overlap with those of {other.config.name}"
                )
        # Two streams of one instant are two streams, also on a clock that stands.
        self._last_created = max(unix_time(), self._last_created + CLOCK_STEP)
        # There is one server.
        config = config._replace(replicas=1)
        self.streams[config.name] = MemoryStream(config, self._last_created)
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
        for key in [key for key in self._pull_consumers if key[0] == name]:
            self._pull_consumers.pop(key).close()

    def look(self, name: str, at: Callable[[MemoryStream], T]) -> T | NoStream:
        """The message that `at` finds in a stream."""
        stream = self.streams.get(name)
        return NoStream(f"stream {name} not found") if stream is None else at(stream)

    def lose_streams(self, *, in_memory_only: bool) -> None:
        """Delete what does not survive a restart of the server, or the loss of its disk either."""
        for name, stream in list(self.streams.items()):
            if stream.config.in_memory or not in_memory_only:
                self.delete(name)

    def attach(self, reader: MemoryOrderedConsumer) -> None | NoStream:
        """Feed a reader from where it is, from the next turn on."""
        stream = self.streams.get(reader.stream)
        if stream is None:
            return NoStream(f"stream {reader.stream} not found")
        if reader not in self._readers:
            self._readers.append(reader)
        reader.generation += 1
        deliver = reader.connection.deliver
        deliver(partial(reader.begin, stream.created, reader.generation))
        end = stream.last_sequence + 1
        start = end if reader.last_per_subject else reader.start_of(stream.created)
        cursor = self._cursors[reader] = _Cursor(reader, stream, max(start, end))
        if reader.last_per_subject:
            self._feed(cursor, stream.last_of_each(reader.pattern))
        else:
            self._feed(cursor, stream.after(start, reader.pattern))
        deliver(partial(reader.caught_up, reader.generation))
        return None

    def detach(self, connection: MemoryLink) -> None:
        """Stop feeding the readers of a connection."""
        for reader in list(self._cursors):
            if reader.connection is connection:
                del self._cursors[reader]
        for puller in self._pull_readers:
            if puller.connection is connection:
                self._deliver_no_more(puller)

    def reattach(self, connection: MemoryLink) -> None:
        """Start the readers of a connection that is back."""
        for reader in self._readers:
            if reader.connection is connection:
                reader.restart()
        for puller in self._pull_readers:
            if puller.connection is connection:
                puller.restart()

    def remove(self, reader: MemoryOrderedConsumer) -> None:
        """Forget a reader."""
        self._cursors.pop(reader, None)
        if reader in self._readers:
            self._readers.remove(reader)

    def ensure_consumer(self, stream: str, config: PullConsumerConfig) -> None | NoStream:
        memory_stream = self.streams.get(stream)
        if memory_stream is None:
            return NoStream(f"stream {stream} not found")
        key = stream, config.name
        if key not in self._pull_consumers:
            self._pull_consumers[key] = MemoryPullConsumer(config, memory_stream, self._context)
            for reader in self._pull_readers:
                if (reader.stream, reader.consumer) == key:
                    reader.restart()
        return None

    def delete_consumer(self, stream: str, consumer: str) -> None:
        pull_consumer = self._pull_consumers.pop((stream, consumer), None)
        if pull_consumer is not None:
            pull_consumer.close()

    def consumer_info(self, stream: str, consumer: str) -> ConsumerInfo | NoStream:
        pull_consumer = self._pull_consumers.get((stream, consumer))
        return NoStream("consumer not found") if pull_consumer is None else pull_consumer.info()

    def pause(self, stream: str, consumer: str, paused: bool) -> None | NoStream:
        pull_consumer = self._pull_consumers.get((stream, consumer))
        if pull_consumer is None:
            return NoStream("consumer not found")
        pull_consumer.pause(paused)
        return None

    def want(self, reader: MemoryPullReader) -> None:
        """Deliver to a reader of a pull consumer what it wants."""
        if self.stalled:
            return
        if reader not in self._pull_readers:
            self._pull_readers.append(reader)
        consumer = self._pull_consumers.get((reader.stream, reader.consumer))
        if consumer is None:
            reader.connection.deliver(reader.miss)
        else:
            consumer.want(reader)

    def forget_reader(self, reader: MemoryPullReader) -> None:
        """Deliver nothing more to a reader of a pull consumer."""
        self._deliver_no_more(reader)
        if reader in self._pull_readers:
            self._pull_readers.remove(reader)

    def _deliver_no_more(self, reader: MemoryPullReader) -> None:
        consumer = self._pull_consumers.get((reader.stream, reader.consumer))
        if consumer is not None:
            consumer.forget(reader)

    def acknowledge(self, token: str, kind: AckKind, delay: float) -> None | Unavailable:
        """Carry out an acknowledgement."""
        _, _, stream, name, sequence = token.split(".")
        consumer = self._pull_consumers.get((stream, name))
        if consumer is None:
            return Unavailable("nobody serves the subject: is JetStream enabled?")
        consumer.acknowledge(int(sequence), kind, delay)
        return None

    def _changed(self, stream: MemoryStream) -> None:
        if not self.stalled:
            for (name, _), consumer in self._pull_consumers.items():
                if name == stream.config.name:
                    consumer.serve()
            for cursor in list(self._cursors.values()):
                if cursor.stream is stream:
                    self._feed(cursor, stream.after(cursor.next_sequence, cursor.reader.pattern))
                    cursor.next_sequence = max(cursor.next_sequence, stream.last_sequence + 1)
        name = stream.config.name
        due = stream.next_expiry()
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        if due is not None:
            loop = asyncio.get_running_loop()
            self._timers[name] = loop.call_at(due, self._expire, stream, context=self._context)

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
        connection: MemoryLink,
        server: JetStreamServer,
        store: Callable[[Message, Callable[[int | DynbusError], None]], None],
    ) -> None:
        self._connection = connection
        self._server = server
        self._store = store

    @property
    def max_payload(self) -> int:
        return self._connection.max_payload

    @property
    def replicas(self) -> int:
        return 1

    def of_region(self, region: str) -> MemoryJetStream:
        raise ConfigError(f"region {region}: a bus in memory is alone, and joins no regions")

    async def ensure_stream(
        self, config: StreamConfig, *, probe: str = "", timeout: float = 5.0
    ) -> None:
        call = f"STREAM.CREATE.{config.name}"
        await self._api(call, partial(self._server.ensure, config), timeout)

    async def has_stream(self, config: StreamConfig, *, timeout: float = 5.0) -> bool:
        return await self._api(
            f"STREAM.INFO.{config.name}", partial(self._server.has, config), timeout
        )

    async def delete_stream(self, name: str, *, timeout: float = 5.0) -> None:
        await self._api(f"STREAM.DELETE.{name}", partial(self._server.delete, name), timeout)

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        timeout: float = 5.0,
        **options: Unpack[PublishOptions],
    ) -> int:
        message = Message(subject, "", publish_headers(options), bytes(data))
        self._connection.check_size(message)
        return await self._connection.request(
            message, partial(self._store, message), timeout=timeout
        )

    async def write_error(self, stream: str, *, timeout: float = 5.0) -> str:
        return await self._look(stream, "PURGE", lambda held: held.write_error, timeout)

    async def read(
        self, stream: str, subject: str = "", *, timeout: float = 5.0
    ) -> list[StoredMessage]:
        return await self._read(stream, subject, 1, None, timeout)

    async def read_page(
        self, stream: str, subject: str = "", *, start: int = 1, timeout: float = 5.0
    ) -> list[StoredMessage]:
        return await self._read(stream, subject, start, PAGE, timeout)

    async def _read(
        self, stream: str, subject: str, start: int, limit: int | None, timeout: float
    ) -> list[StoredMessage]:
        def held(of: MemoryStream) -> list[StoredMessage]:
            return [of.get(sequence) for sequence in of.after(start, subject or ">")[:limit]]

        return await self._look(stream, "DIRECT.GET", held, timeout)

    async def read_last(
        self, stream: str, subjects: Sequence[str], *, timeout: float = 5.0
    ) -> list[StoredMessage]:
        def held(of: MemoryStream) -> list[StoredMessage]:
            sequences = {one for subject in subjects for one in of.last_of_each(subject)}
            return [of.get(sequence) for sequence in sorted(sequences)]

        return await self._look(stream, "DIRECT.GET", held, timeout)

    async def read_one(
        self, stream: str, subject: str, *, timeout: float = 5.0
    ) -> StoredMessage | None:
        return await self._look(stream, "DIRECT.GET", lambda held: held.last(subject), timeout)

    async def last(
        self, stream: str, subject: str, *, timeout: float = 5.0
    ) -> StoredMessage | None:
        return await self._look(stream, "MSG.GET", lambda held: held.last(subject), timeout)

    async def purge(
        self, stream: str, subject: str = "", *, up_to: int = 0, timeout: float = 5.0
    ) -> int:
        def drop(held: MemoryStream) -> int:
            return held.purge(subject or ">", up_to)

        return await self._look(stream, "PURGE", drop, timeout)

    async def stream_info(self, stream: str, *, timeout: float = 5.0) -> StreamInfo:
        return await self._look(stream, "INFO", lambda held: held.info(unix_time()), timeout)

    async def stream_config(self, stream: str, *, timeout: float = 5.0) -> StreamConfig:
        return await self._look(stream, "INFO", lambda held: held.config, timeout)

    async def note(self, stream: str, name: str, text: str, *, timeout: float = 5.0) -> None:
        def keep(held: MemoryStream) -> None:
            metadata = {**dict(held.config.metadata), name: text}
            held.config = held.config._replace(metadata=tuple(metadata.items()))

        await self._look(stream, "UPDATE", keep, timeout)

    async def consume(
        self,
        stream: str,
        on_message: Callable[[StoredMessage], None],
        **options: Unpack[ConsumeOptions],
    ) -> MemoryOrderedConsumer:
        reader = MemoryOrderedConsumer(self._connection, self._server, stream, on_message, options)
        call = f"CONSUMER.CREATE.{stream}"
        try:
            await self._api(call, partial(self._server.attach, reader), CONSUME_TIMEOUT)
        except BaseException:
            # The request may have been carried out all the same.
            await reader.stop()
            raise
        return reader

    async def ensure_pull_consumer(
        self, stream: str, config: PullConsumerConfig, *, timeout: float = 5.0
    ) -> None:
        call = f"CONSUMER.CREATE.{stream}.{config.name}"
        await self._api(call, partial(self._server.ensure_consumer, stream, config), timeout)

    async def delete_consumer(self, stream: str, consumer: str, *, timeout: float = 5.0) -> None:
        call = f"CONSUMER.DELETE.{stream}.{consumer}"
        await self._api(call, partial(self._server.delete_consumer, stream, consumer), timeout)

    async def consumer_info(
        self, stream: str, consumer: str, *, timeout: float = 5.0
    ) -> ConsumerInfo:
        call = f"CONSUMER.INFO.{stream}.{consumer}"
        return await self._api(call, partial(self._server.consumer_info, stream, consumer), timeout)

    async def pause_consumer(
        self, stream: str, consumer: str, paused: bool, *, timeout: float = 5.0
    ) -> None:
        call = f"CONSUMER.PAUSE.{stream}.{consumer}"
        await self._api(call, partial(self._server.pause, stream, consumer, paused), timeout)

    def pull(
        self,
        stream: str,
        consumer: str,
        on_delivery: Callable[[Delivery], None],
        *,
        on_missing: Callable[[], None],
    ) -> MemoryPullReader:
        connection, server = self._connection, self._server
        return MemoryPullReader(connection, server, stream, consumer, on_delivery, on_missing)

    async def delete_message(self, stream: str, sequence: int, *, timeout: float = 5.0) -> bool:
        return await self._look(stream, "MSG.DELETE", lambda held: held.drop(sequence), timeout)

    async def acknowledge(
        self, token: str, kind: AckKind, *, delay: float = 0.0, timeout: float = 5.0
    ) -> None:
        def serve(answer: Callable[[None | DynbusError], None]) -> None:
            if not self._server.stalled:
                answer(self._server.acknowledge(token, kind, delay))

        message = Message(token, "", b"", ack_payload(kind, delay))
        await self._connection.request(message, serve, timeout=timeout)

    async def _look(
        self, stream: str, call: str, at: Callable[[MemoryStream], T], timeout: float
    ) -> T:
        look = partial(self._server.look, stream, at)
        return await self._api(f"STREAM.{call}.{stream}", look, timeout)

    async def _api(self, call: str, act: Callable[[], T | DynbusError], timeout: float) -> T:
        def serve(answer: Callable[[T | DynbusError], None]) -> None:
            if not self._server.stalled:
                answer(act())

        message = Message(f"$JS.API.{call}", "", b"", b"")
        return await self._connection.request(message, serve, timeout=timeout)
