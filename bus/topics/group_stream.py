"""The place of a group in the events of a topic: its consumer, from which its members take."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from dynbus.bus.bus import Bus
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import (
    EndpointName,
    event_subject,
    group_subject,
    lane_of_event,
)
from dynbus.bus.transport import (
    ConnectionState,
    Delivery,
    JetStream,
    NoStream,
    PullConsumerConfig,
    StoredMessage,
)
from dynbus.bus.work_queue import (
    ORDERED_LANES,
    JobLog,
    JobStream,
    QueueFigures,
    Taker,
    WorkQueueConfig,
    taking,
)

from .topic_stream import TopicConfig, TopicStream

ANY_LANE: Final = "*"
"""The one lane of a group that is not ordered."""


class GroupConfig(NamedTuple):
    """A group of a topic.

    Attributes:
        handler: the one method whose instances are its members.
        tries: how its events are handed out, and tried again. Where it is ordered, the events of a
            key are handed out in order, one at a time.
        new_only, start_time: where it begins when it is made: after the newest event, or at the
            first since a time in Unix seconds; else at the oldest that is kept.
    """

    name: str
    handler: EndpointName
    tries: WorkQueueConfig = WorkQueueConfig()
    new_only: bool = True
    start_time: float | None = None


class GroupStream(JobStream):
    """The stream of a topic as one of its groups takes of it. What is acknowledged there stays for
    the others."""

    def __init__(self, bus: Bus, topic: TopicStream, group: GroupConfig) -> None:
        super().__init__(bus.data, group.handler, group.tries)
        self.stream = topic.config.stream
        self.lanes = ORDERED_LANES if group.tries.ordered else (ANY_LANE,)
        self.consumers = group_consumers(topic.config, group)
        self.waiting = [0] * len(self.lanes)
        self._bus = bus
        self._topic = topic
        self._group = group
        self._log = JobLog(bus.data.jetstream, group.handler)
        self._figures = QueueFigures(bus.telemetry, group.handler)

    def __repr__(self) -> str:
        return f"<GroupStream {self._group.name} of {self._topic.config}>"

    async def oldest_age(self) -> float | None:
        """None: what is acknowledged stays in the stream."""
        return None

    async def ensure(self) -> None:
        """Make the stream and the consumers where they are missing.

        Raises:
            ConfigError: as of `TopicStream.ensure`, or another method has the group, or it had no
                order of keys until now, or had one.
            PermissionDenied, NoRoom, Unavailable: as of `JetStream.ensure_stream`.
        """
        await self._topic.ensure()
        if self.config.ordered:
            # It keeps which deliveries were no tries.
            await self._log.ensure()
        await self._refuse_other_order()
        await self._of_each(lambda one: self.jetstream.ensure_pull_consumer(self.stream, one))
        info = await self.learn()
        if info.description and info.description != str(self.name):
            raise ConfigError(
                f"the group {self._group.name!r} of {self._topic.config} is that of "
                f"{info.description}, and {self.name} claims it too: each of them would get a part "
                "of the events; give one of them a group of another name, or where the first is "
                f"gone: {self._remedy}"
            )

    async def _refuse_other_order(self) -> None:
        ordered = not self.config.ordered
        other = consumer_names(self._group.name, ordered=ordered)[0]
        try:
            await self.jetstream.consumer_info(self.stream, other)
        except NoStream:
            return
        raise ConfigError(
            f"the group {self._group.name!r} of {self._topic.config} was made "
            f"{'with' if ordered else 'without'} ordered=True, and its place cannot go over to "
            f"{self.name}, which has it {'not' if ordered else 'so'}: give this one a group of "
            f"another name, or where the place is of no use any more: {self._remedy}"
        )

    @property
    def _remedy(self) -> str:
        return f"dynbus topic forget {self._topic.config} {self._group.name}"

    def copy_subject(self, message: StoredMessage, name: str) -> str:
        return f"{self.group_of(message)}.{name}"

    def lane_of(self, message: StoredMessage) -> str:
        return lane_of_event(message.subject)

    def group_of(self, message: StoredMessage) -> str:
        topic = self._topic.config
        lane = lane_of_event(message.subject)
        return group_subject(topic.namespace, topic.name, self._group.name, lane)

    def default_id(self, message: StoredMessage) -> str:
        return str(message.sequence)

    async def is_dropped(self, delivery: Delivery, created: float, timeout: float) -> bool:
        """True if the server has forgotten that it handed an event out, and will hand it out again:
        its taker knows it then.
        """
        if self.connection.state is not ConnectionState.CONNECTED:
            return False
        lane = lane_of_event(delivery.message.subject)
        place = self.lanes.index(lane) if self.config.ordered else 0
        consumer = self.consumers[place].name
        info = await self.jetstream.consumer_info(self.stream, consumer, timeout=timeout)
        return info.delivered < delivery.message.sequence

    @asynccontextmanager
    async def take(self, limit: int) -> AsyncGenerator[Taker]:
        """Take events as a member of the group, and hold at most `limit` at a time.

        Raises:
            ConfigError, Unavailable: as of `ensure`.
        """
        async with taking(self._bus, self, limit, self._figures) as taker:
            yield taker


def consumer_names(group: str, *, ordered: bool) -> tuple[str, ...]:
    """The names of the consumers of a group; `+` is in no group's name."""
    return tuple(f"{group}+{lane}" for lane in ORDERED_LANES) if ordered else (group,)


def group_consumers(topic: TopicConfig, group: GroupConfig) -> tuple[PullConsumerConfig, ...]:
    """The consumers that the members of a group share, one for each lane where it is ordered."""
    ordered = group.tries.ordered
    lanes = ORDERED_LANES if ordered else (ANY_LANE,)
    where = topic.namespace, topic.name
    return tuple(
        PullConsumerConfig(
            name,
            group.tries.ack_wait,
            # So the server hands out the next event of a lane when the one before it is settled.
            max_ack_pending=1 if ordered else None,
            subjects=(
                event_subject(*where, lane),
                f"{group_subject(*where, group.name, lane)}.>",
            ),
            new_only=group.new_only,
            start_time=group.start_time,
            description=str(group.handler),
        )
        for name, lane in zip(consumer_names(group.name, ordered=ordered), lanes, strict=True)
    )


async def forget_group(jetstream: JetStream, topic: TopicConfig, group: str) -> None:
    """Drop the place of a group; one that has none is no error."""
    for ordered in (False, True):
        for name in consumer_names(group, ordered=ordered):
            await jetstream.delete_consumer(topic.stream, name)
