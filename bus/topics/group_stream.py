"""The place of a group in the events of a topic: its consumer, from which its members take."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from dynbus.bus.bus import Bus
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import EndpointName, group_subject, topic_subject
from dynbus.bus.transport import ConnectionState, Delivery, PullConsumerConfig, StoredMessage
from dynbus.bus.work_queue import JobStream, QueueFigures, Taker, WorkQueueConfig, taking

from .topic_stream import TopicStream

LANE: Final = "events"
"""The one lane of a group."""


class GroupConfig(NamedTuple):
    """A group of a topic.

    Attributes:
        handler: the one method whose instances are its members.
        tries: how its events are handed out, and tried again.
        ordered: whether one event is handed out at a time, in the order of the topic.
        new_only, start_time: where it begins when it is made: after the newest event, or at the
            first since a time in Unix seconds; else at the oldest that is kept.
    """

    name: str
    handler: EndpointName
    tries: WorkQueueConfig = WorkQueueConfig()
    ordered: bool = False
    new_only: bool = True
    start_time: float | None = None


class GroupStream(JobStream):
    """The stream of a topic as one of its groups takes of it. What is acknowledged there stays for
    the others."""

    def __init__(self, bus: Bus, topic: TopicStream, group: GroupConfig) -> None:
        super().__init__(bus.data, group.handler, group.tries)
        self.stream = topic.config.stream
        where = topic.config.namespace, topic.config.name
        self.redrives_to = group_subject(*where, group.name, "")[:-1]
        self.lanes = (LANE,)
        self.consumers = (group_consumer(*where, group),)
        self.waiting = [0]
        self._bus = bus
        self._topic = topic
        self._group = group
        self._figures = QueueFigures(bus.telemetry, group.handler)

    def __repr__(self) -> str:
        return f"<GroupStream {self._group.name} of {self._topic.config}>"

    async def ensure(self) -> None:
        """Make the stream and the consumer where they are missing.

        Raises:
            ConfigError: as of `TopicStream.ensure`, or another method has the group.
            PermissionDenied, NoRoom, Unavailable: as of `JetStream.ensure_stream`.
        """
        await self._topic.ensure()
        await self.jetstream.ensure_pull_consumer(self.stream, self.consumers[0])
        info = await self.learn()
        if info.description and info.description != str(self.name):
            raise ConfigError(
                f"the group {self._group.name!r} of {self._topic.config} is that of "
                f"{info.description}, and {self.name} claims it too: each of them would get a part "
                "of the events; give one of them a group of another name, or where the first is "
                f"gone: nats consumer rm {self.stream} {self._group.name}"
            )

    def copy_subject(self, message: StoredMessage, name: str) -> str:
        return f"{self.redrives_to}.{name}"

    def default_id(self, message: StoredMessage) -> str:
        return str(message.sequence)

    async def is_dropped(self, delivery: Delivery, created: float, timeout: float) -> bool:
        """Whether the server has forgotten that it handed an event out, and will hand it out
        again: its taker knows it then."""
        if self.connection.state is not ConnectionState.CONNECTED:
            return False
        info = await self.jetstream.consumer_info(self.stream, self._group.name, timeout=timeout)
        return info.delivered < delivery.message.sequence

    @asynccontextmanager
    async def take(self, limit: int) -> AsyncGenerator[Taker]:
        """Take events as a member of the group, and hold at most `limit` at a time.

        Raises:
            ConfigError, Unavailable: as of `ensure`.
        """
        async with taking(self._bus, self, limit, self._figures) as taker:
            yield taker


def group_consumer(namespace: str, topic: str, group: GroupConfig) -> PullConsumerConfig:
    """The consumer that the members of a group share."""
    return PullConsumerConfig(
        group.name,
        group.tries.ack_wait,
        max_ack_pending=1 if group.ordered else 65_536,
        subjects=(topic_subject(namespace, topic), group_subject(namespace, topic, group.name)),
        new_only=group.new_only,
        start_time=group.start_time,
        description=str(group.handler),
    )
