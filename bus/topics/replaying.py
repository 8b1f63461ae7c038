"""Events that a group has had once more: copies, which no other group gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from dynbus.bus.background import task_group
from dynbus.bus.errors import ConfigError, PayloadTooLarge
from dynbus.bus.protocol import headers as header_names
from dynbus.bus.protocol.names import copy_stream, event_subject, group_subject, job_token
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.transport import ConsumerInfo, JetStream, NoStream, StoredMessage, StreamFull
from dynbus.bus.work_queue import ORDERED_LANES

from .group_stream import consumer_names
from .topic_stream import TopicConfig, event_of


class GroupPlace(NamedTuple):
    """The place of a group in the events of its topic.

    Attributes:
        ordered: whether it has the events of a key one at a time.
        delivered: the sequence of the last event that each lane has handed out, in the order of the
            lanes; one for all lanes where it is not ordered.
        waiting, held: as of a queue.
        handler: the method whose instances are its members.
    """

    ordered: bool
    delivered: tuple[int, ...]
    waiting: int
    held: int
    handler: str

    @classmethod
    def of(cls, infos: Sequence[ConsumerInfo]) -> GroupPlace:
        """The place of a group, of what its consumers say."""
        return cls(
            len(infos) > 1,
            tuple(info.delivered for info in infos),
            sum(info.pending for info in infos),
            sum(info.ack_pending for info in infos),
            infos[0].description,
        )

    def has_had(self, lane: int, sequence: int) -> bool:
        """True if an event of a lane was handed out."""
        return sequence <= self.delivered[lane if self.ordered else 0]


async def find_group(jetstream: JetStream, stream: str, group: str) -> GroupPlace | None:
    """The place of a group; None where there is no such group.

    Raises:
        Unavailable: the server does not answer.
    """
    for ordered in (False, True):
        with suppress(NoStream):
            return GroupPlace.of(
                [
                    await jetstream.consumer_info(stream, name)
                    for name in consumer_names(group, ordered=ordered)
                ]
            )
    return None


async def replay(
    jetstream: JetStream,
    topic: TopicConfig,
    group: str,
    place: GroupPlace,
    *,
    since: float = -math.inf,
    until: float = math.inf,
    region: str = "",
    on_left_out: Callable[[int, str], object] = lambda sequence, why: None,
) -> int:
    """Give a group the events once more that it has had, or those of another region; how many there
    were.

    They come behind those that wait, in their order, under the same ids and with all their tries.
    Events that the group has not had yet come in their turn, and are left alone.

    Args:
        since, until: when they were published, in Unix seconds by the server's clock.
        region: another one, whose events are read in the copy that is kept here; empty for the own.
            Nobody knows here which of them its group has had: all are given that the copy has when
            this begins.
        on_left_out: called with the sequence of an event that cannot be given, and why: its copy
            does not fit into a message, or it has an id that no event can have.

    Raises:
        StreamFull: the topic has no room for all of them; those that were given stay.
        NoStream: the topic is gone, or there is no copy of it.
        Unavailable: the server does not answer; some may have been given.
    """
    name = random_id()
    stream = copy_stream(topic.stream, region) if region else topic.stream
    # Who publishes on, faster than events are given, keeps nobody at it.
    last = (await jetstream.stream_info(stream)).last_sequence
    given: list[int] = []
    refused: list[StreamFull] = []

    async def of_lane(number: int, lane: str) -> None:
        subject = event_subject(topic.namespace, topic.name, lane)
        below = group_subject(topic.namespace, topic.name, group, lane)
        start = 1
        while page := await jetstream.read_page(stream, subject, start=start):
            for message in page:
                still_waits = not region and not place.has_had(number, message.sequence)
                if refused or still_waits or message.sequence > last:
                    return
                if not since <= message.time <= until or header_names.STREAM in message.headers:
                    # Nobody has published an answer of the server.
                    continue
                try:
                    await _give(jetstream, message, below, name)
                except StreamFull as error:
                    refused.append(error)
                    return
                except (PayloadTooLarge, ConfigError) as error:
                    on_left_out(message.sequence, str(error))
                    continue
                given.append(message.sequence)
            start = page[-1].sequence + 1

    async with task_group() as tasks:
        for number, lane in enumerate(ORDERED_LANES):
            tasks.start_soon(of_lane, number, lane)
    if refused:
        raise StreamFull(
            f"the topic {topic} is full: {len(given)} events were given to {group} again, and "
            "there was no room for the rest; ask for less, or wait until older events are gone"
        )
    return len(given)


async def _give(jetstream: JetStream, message: StoredMessage, below: str, name: str) -> None:
    event = event_of(message)
    await jetstream.publish(
        f"{below}.{job_token(event.event_id)}.{name}",
        message.data,
        message_id=f"{event.event_id} {name}{below}",
        headers={**header_names.carried(event.headers), header_names.JOB: event.event_id},
    )
