"""The streams that processes of a namespace need of a server: those of the kernel, of queues and of
topics."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from dynbus.bus.errors import ConfigError, Unavailable
from dynbus.bus.flight import flight_stream
from dynbus.bus.protocol.names import EndpointName, check_other_region, check_token
from dynbus.bus.protocol.seconds import seconds_of
from dynbus.bus.records.abroad import ABROAD_STREAM
from dynbus.bus.records.instance_records import INSTANCES_STREAM
from dynbus.bus.topics import (
    DEFAULT_MAX_BYTES,
    GroupConfig,
    TopicConfig,
    group_consumers,
    topic_config,
    topic_copy_config,
)
from dynbus.bus.transport import Connection, NoStream, PullConsumerConfig, StreamConfig
from dynbus.bus.work_queue import (
    HOLDERS_STREAM,
    WorkQueueConfig,
    copy_configs,
    dead_letter_config,
    job_log_config,
    keep_copies,
    queue_config,
    takers_config,
)


class NeededStream(NamedTuple):
    """A stream, and the consumers that its readers share, if they do.

    Attributes:
        copied: the queue whose jobs, or their log, it copies from another region; None for others,
            copies of topics too.
    """

    stream: StreamConfig
    consumers: tuple[PullConsumerConfig, ...] = ()
    copied: EndpointName | None = None

    @classmethod
    def of_queue(cls, name: EndpointName, config: WorkQueueConfig) -> NeededStream:
        """The stream of a queue of jobs."""
        return cls(queue_config(name, config), takers_config(name, config))

    @classmethod
    def of_job_log(cls, name: EndpointName) -> NeededStream:
        """The stream in which a durable handler keeps the records of its jobs."""
        return cls(job_log_config(name))

    @classmethod
    def of_copies(cls, name: EndpointName, region: str) -> list[NeededStream]:
        """The streams in which a region keeps copies of the jobs of a durable handler of another
        one, and of what became of them."""
        return [cls(config, copied=name) for config in copy_configs(name, region)]

    async def announce(self, connection: Connection) -> None:
        """Ask another region for what is copied from it, and have the takers of a queue there know
        of its copy; nothing for what is no copy.

        Raises:
            ConfigError: the connection is not to a region, or to that one, or that one has no such
                queue or topic.
            Unavailable: that region does not answer.
        """
        mirror = self.stream.mirror
        if mirror is None:
            return
        if self.copied is not None:
            await keep_copies(connection, self.copied, mirror.region)
            return
        check_other_region(connection.region, mirror.region)
        try:
            await connection.jetstream.of_region(mirror.region).stream_info(mirror.stream)
        except NoStream:
            raise ConfigError(
                f"region {mirror.region} has no stream {mirror.stream} to be copied: run "
                "`dynbus setup` there first"
            ) from None
        except Unavailable as error:
            raise Unavailable(f"region {mirror.region} does not answer: {error}") from None

    def topic_copy(self, region: str) -> NeededStream:
        """The stream in which a region keeps a copy of this topic of another one."""
        return NeededStream(topic_copy_config(self.stream, region))

    @classmethod
    def of_topic(
        cls,
        namespace: str,
        name: str,
        *,
        retain: float | str = "7d",
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> NeededStream:
        """The stream of a topic, without consumers of groups.

        Args:
            retain: for how long events are kept, as `Topic` takes it.

        Raises:
            ConfigError: the name or a setting is not usable.
        """
        seconds = seconds_of(retain, f"topic {name}: retain")
        config = TopicConfig(namespace, name, seconds, max_bytes=max_bytes)
        return cls(topic_config(config.check()))

    def with_group(
        self,
        topic: tuple[str, str],
        group: str,
        handler: EndpointName,
        config: WorkQueueConfig,
        start: str,
    ) -> NeededStream:
        """The stream of a topic with the consumers of one more group.

        Args:
            topic: its namespace and its name.
            handler: the method that takes the group's events.
            start: where a new group begins: `new`, `all`, or a time with its zone.

        Raises:
            ConfigError: the name or the start is not usable.
        """
        at = None if start in ("new", "all") else _time_of(start, group)
        tries = GroupConfig(
            check_token("group", group), handler, config, new_only=start == "new", start_time=at
        )
        made = group_consumers(TopicConfig(*topic, None), tries)
        return self._replace(consumers=(*self.consumers, *made))

    @classmethod
    def of_region(cls, region: str) -> list[NeededStream]:
        """The stream in which a region keeps what the others' instances say of themselves.

        Args:
            region: that of the servers; empty for none, which needs no stream.
        """
        return [cls(ABROAD_STREAM)] if region else []

    @staticmethod
    def of_kernel(namespace: str) -> list[StreamConfig]:
        """The streams of actors and their callers: leases, what takers hold, dead letters, and what
        is recorded."""
        return [
            INSTANCES_STREAM,
            HOLDERS_STREAM,
            dead_letter_config(namespace),
            flight_stream(namespace),
        ]


def _time_of(text: str, group: str) -> float:
    try:
        at = datetime.fromisoformat(text)
        if at.tzinfo is not None:
            return at.timestamp()
    except ValueError:
        pass
    raise ConfigError(
        f"the group {group}: from = {text!r} is none of `new`, `all` and a time with its zone"
    )
