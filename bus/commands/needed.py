"""The streams that processes of a namespace need of a server: those of the kernel, of queues and of
topics."""

from __future__ import annotations

from typing import NamedTuple

from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.seconds import seconds_of
from dynbus.bus.records.instance_records import INSTANCES_STREAM
from dynbus.bus.topics import DEFAULT_MAX_BYTES, TopicConfig, topic_config
from dynbus.bus.transport import PullConsumerConfig, StreamConfig
from dynbus.bus.work_queue import (
    HOLDERS_STREAM,
    WorkQueueConfig,
    dead_letter_config,
    job_log_config,
    queue_config,
    takers_config,
)


class NeededStream(NamedTuple):
    """A stream, and the consumers that its readers share, if they do."""

    stream: StreamConfig
    consumers: tuple[PullConsumerConfig, ...] = ()

    @classmethod
    def of_queue(cls, name: EndpointName, config: WorkQueueConfig) -> NeededStream:
        """The stream of a queue of jobs."""
        return cls(queue_config(name, config), takers_config(name, config))

    @classmethod
    def of_job_log(cls, name: EndpointName) -> NeededStream:
        """The stream in which a durable handler keeps the records of its jobs."""
        return cls(job_log_config(name))

    @classmethod
    def of_topic(
        cls,
        namespace: str,
        name: str,
        *,
        retain: float | str = "7d",
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> NeededStream:
        """The stream of a topic; groups make their consumers themselves.

        Args:
            retain: for how long events are kept, as `Topic` takes it.

        Raises:
            ConfigError: the name or a setting is not usable.
        """
        seconds = seconds_of(retain, f"topic {name}: retain")
        config = TopicConfig(namespace, name, seconds, max_bytes=max_bytes)
        return cls(topic_config(config.check()))

    @staticmethod
    def of_kernel(namespace: str) -> list[StreamConfig]:
        """The streams of actors and their callers: leases, what takers hold, dead letters."""
        return [INSTANCES_STREAM, HOLDERS_STREAM, dead_letter_config(namespace)]
