"""The events of a topic: published, kept for a time, and read by instances as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from dynbus.bus.clock import monotonic
from dynbus.bus.context import MAX_ID_LENGTH
from dynbus.bus.errors import ConfigError, PayloadTooLarge
from dynbus.bus.protocol import headers as header_names
from dynbus.bus.protocol.names import (
    check_topic,
    copy_stream,
    event_subject,
    group_subject,
    topic_key,
    topic_stream,
    topic_subject,
)
from dynbus.bus.transport import (
    Connection,
    JetStream,
    Message,
    NoStream,
    OrderedConsumer,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    StreamSource,
    Subscription,
)
from dynbus.bus.work_queue import ORDERED_LANES, is_reserved, store

from .observing import TopicFigures

if TYPE_CHECKING:
    from dynbus.bus.telemetry.telemetry import Telemetry

SCHEMA: Final = "dynbus.schema"
"""The type of the events, in the metadata of a stream."""
MAX_SCHEMA_BYTES: Final = 64 * 1024
DEFAULT_MAX_BYTES: Final = 256 * 1024 * 1024
LEAST_RETAIN: Final = 1.0
LETTER_ROOM: Final = 4096
"""Bytes of a message that an event leaves to what a dead letter says of it."""


class TopicConfig(NamedTuple):
    """A topic.

    Attributes:
        retain: seconds for which its events are kept; None for a topic whose events are not.
        schema: the JSON Schema of its events, as text; empty where nobody knows.
        max_bytes: of all events that are kept; a publisher of more gets `Overloaded`.
    """

    namespace: str
    name: str
    retain: float | None
    schema: str = ""
    max_bytes: int = DEFAULT_MAX_BYTES

    def check(self) -> TopicConfig:
        """Return it when it is usable.

        Raises:
            ConfigError: it is not.
        """
        check_topic(self.name)
        if self.retain is not None and self.retain < LEAST_RETAIN:
            raise ConfigError(
                f"topic {self.name}: retain={self.retain:g} s is less than a second: give more, or "
                "None for events that are not kept"
            )
        if self.max_bytes < 1:
            raise ConfigError(
                f"topic {self.name}: max_bytes={self.max_bytes} is not usable: give 1 or more"
            )
        return self

    @property
    def stream(self) -> str:
        """The name of the stream that keeps its events."""
        return topic_stream(self.namespace, self.name)

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"


def topic_config(topic: TopicConfig) -> StreamConfig:
    """The stream of a topic."""
    is_kept = topic.schema and len(topic.schema) <= MAX_SCHEMA_BYTES
    return StreamConfig(
        topic.stream,
        (
            topic_subject(topic.namespace, topic.name),
            f"{group_subject(topic.namespace, topic.name, '*')}.>",
        ),
        StreamLimits(max_bytes=topic.max_bytes, max_age=topic.retain, discard_new=True),
        description="dynbus: events",
        metadata=((SCHEMA, topic.schema),) if is_kept else (),
        lanes=len(ORDERED_LANES),
    )


def topic_copy_config(topic: StreamConfig, region: str) -> StreamConfig:
    """The stream in which a region keeps a copy of a topic of another one, for as long and of as
    many bytes as its own: the oldest go first."""
    return StreamConfig(
        copy_stream(topic.name, region),
        (),
        topic.limits._replace(discard_new=False),
        description=f"dynbus: copy of the events of region {region}",
        mirror=StreamSource(region, topic.name),
    )


class Event(NamedTuple):
    """An event as it was published.

    Attributes:
        key: the token of its key; `=` without one.
        sequence: its place in the stream; 0 where it is not kept.
        time: Unix seconds at which the server stored it; 0 where it is not kept.
        headers: those that came with it, without the server's.
    """

    event_id: str
    key: str
    sequence: int
    time: float
    headers: Mapping[str, str]
    data: bytes


def event_of(message: StoredMessage) -> Event:
    """The event that a message is; plain NATS clients publish them too."""
    fields = message.headers
    event_id = fields.get(header_names.JOB) or fields.get(header_names.MESSAGE_ID)
    return Event(
        (event_id or str(message.sequence))[:MAX_ID_LENGTH],
        message.subject.rpartition(".")[2],
        message.sequence,
        message.time,
        {name: value for name, value in fields.items() if not is_reserved(name)},
        message.data,
    )


class TopicStream:
    """The events of one topic, for those who publish them and for instances that hear them.

    Args:
        misfit: what is wrong with events of a schema that is kept with the stream for readers and
            writers here; empty for nothing.
    """

    def __init__(
        self,
        connection: Connection,
        config: TopicConfig,
        misfit: Callable[[str], str],
        telemetry: Telemetry | None = None,
    ) -> None:
        self.config = config
        self.figures = TopicFigures(telemetry, config.namespace, config.name)
        self._connection = connection
        self._jetstream: JetStream = connection.jetstream
        self._misfit = misfit
        self._is_checked = False

    def __repr__(self) -> str:
        return f"<TopicStream {self.config}>"

    async def ensure(self) -> None:
        """Make the stream where it is missing, and compare the type of its events.

        Raises:
            ConfigError: there is another one of its name, or its events are of another type.
            PermissionDenied, NoRoom, Unavailable: as of `JetStream.ensure_stream`.
        """
        config = topic_config(self.config)
        await self._jetstream.ensure_stream(config)
        kept = dict((await self._jetstream.stream_config(config.name)).metadata)
        schema = kept.get(SCHEMA, "")
        wrong = self._misfit(schema) if schema and self.config.schema else ""
        if wrong:
            raise ConfigError(
                f"the topic {self.config} has events of another type: {wrong}; give the new type a "
                "topic of another name, or where nobody needs the old events any more: nats stream "
                f"rm {config.name}"
            )
        self._is_checked = True

    async def publish(
        self, data: bytes, key: str, event_id: str, fields: Mapping[str, str], timeout: float
    ) -> None:
        """Publish an event; of a topic that keeps them, the server has it on return.

        Raises:
            ConfigError: as of `ensure`.
            Overloaded: the stream is full.
            PayloadTooLarge: it does not fit into a message.
            Unavailable: the server did not confirm it in time; it may be there.
        """
        with self.figures.publishing(event_id) as trace:
            fields = {**trace, **fields, header_names.JOB: event_id}
            await self._publish(data, key, event_id, fields, timeout)

    async def _publish(
        self, data: bytes, key: str, event_id: str, fields: Mapping[str, str], timeout: float
    ) -> None:
        subject = topic_subject(self.config.namespace, self.config.name, topic_key(key))
        room = self._jetstream.max_payload - LETTER_ROOM
        size = len(data) + sum(len(name) + len(value) + 4 for name, value in fields.items())
        if size > room:
            raise PayloadTooLarge(
                f"an event of {size} bytes does not fit into the topic {self.config}, whose "
                f"messages have room for {room}: put what it is about elsewhere, and its name into "
                "the event"
            )
        if self.config.retain is None:
            self._connection.publish(subject, data, headers=header_names.encode(fields))
            return
        until = monotonic() + timeout
        if not self._is_checked:
            await self.ensure()
        await store(
            self._jetstream,
            subject,
            data,
            message_id=event_id,
            fields=fields,
            until=until,
            ensure=self.ensure,
            what=f"event {event_id}",
            where=f"the topic {self.config}",
        )

    async def listen(
        self, on_event: Callable[[Event], None], since: float | None = None
    ) -> Listening:
        """Hear what is published from now on, in its order.

        Args:
            since: a time in Unix seconds by the server's clock: hear what is kept from then on
                first.

        Raises:
            ConfigError: as of `ensure`.
            Unavailable: the server does not answer.
        """
        where = self.config.namespace, self.config.name
        if self.config.retain is None:

            def hear(message: Message) -> None:
                fields = header_names.decode(message.headers)
                on_event(event_of(StoredMessage(message.subject, 0, 0.0, fields, message.data)))

            subscription = self._connection.subscribe(topic_subject(*where), hear)
            await self._connection.barrier()
            return Listening(subscription=subscription)
        await self.ensure()
        info = await self._jetstream.stream_info(self.config.stream)

        def hear_kept(message: StoredMessage) -> None:
            if since is None or message.time >= since:
                on_event(event_of(message))

        consumer = await self._jetstream.consume(
            self.config.stream,
            hear_kept,
            subject=event_subject(*where),
            start_sequence=info.last_sequence + 1 if since is None else 1,
            created=info.created,
        )
        return Listening(consumer=consumer)


class Listening:
    """An instance that hears the events of a topic, until it stops."""

    def __init__(
        self, *, subscription: Subscription | None = None, consumer: OrderedConsumer | None = None
    ) -> None:
        self._subscription = subscription
        self._consumer = consumer

    async def stop(self) -> None:
        """Hear nothing more."""
        if self._subscription is not None:
            self._subscription.unsubscribe()
        if self._consumer is not None:
            with suppress(NoStream):
                await self._consumer.stop()
