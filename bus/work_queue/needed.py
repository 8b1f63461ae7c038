"""The streams that processes of a namespace need of a server: those of the kernel and of queues."""

from __future__ import annotations

from typing import NamedTuple

from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.records.instance_records import INSTANCES_STREAM
from dynbus.bus.transport import PullConsumerConfig, StreamConfig

from .dead_letters import dead_letter_config
from .holders import HOLDERS_STREAM
from .job import WorkQueueConfig
from .job_stream import queue_config, takers_config


class NeededStream(NamedTuple):
    """A stream, and the consumers that its readers share, if they do."""

    stream: StreamConfig
    consumers: tuple[PullConsumerConfig, ...] = ()

    @classmethod
    def of_queue(cls, name: EndpointName, config: WorkQueueConfig) -> NeededStream:
        """The stream of a queue of jobs."""
        return cls(queue_config(name, config), takers_config(name, config))

    @staticmethod
    def of_kernel(namespace: str) -> list[StreamConfig]:
        """Those of actors and their callers: leases, what takers hold, dead letters."""
        return [INSTANCES_STREAM, HOLDERS_STREAM, dead_letter_config(namespace)]
