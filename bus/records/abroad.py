"""The records of instances of other regions: how each is announced there, kept and read.

A region is a JetStream domain: servers that keep streams of their own, and are leaf nodes of the
servers that join the regions. An instance that renews its record says the same to all regions, and
each keeps what it hears in a stream of its own: a call that finds nobody at home finds out at once
who is abroad. Nothing is asked of the other region's JetStream, so what is known here is right
again with the first renewal after a cut, and runs out by itself while there is none.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dynbus.bus.clock import unix_time
from dynbus.bus.protocol.names import ABROAD_STREAM_NAME, InstanceName, abroad_subject
from dynbus.bus.protocol.wire import InstanceRecord
from dynbus.bus.transport import (
    JetStream,
    StoredMessage,
    StreamConfig,
)

from .instance_records import INSTANCES_STREAM, MARKER_TTL, record_of
from .reading import read_until

ABROAD_STREAM: Final = StreamConfig(
    name=ABROAD_STREAM_NAME,
    subjects=(abroad_subject("*", InstanceName("*", "*", "*")),),
    limits=INSTANCES_STREAM.limits,
    marker_ttl=MARKER_TTL,
    description="dynbus: the instances of all regions, as they say themselves",
)
HEARD_WITHIN: Final = 10.0
"""Seconds within which each instance of a region that can be reached says something, twice over."""


class RegionAbroad(NamedTuple):
    """Another region of which something was heard within the last minutes.

    Attributes:
        silent: seconds since one of its instances was heard, or was no longer.
    """

    name: str
    silent: float


class Abroad(NamedTuple):
    """The other regions, and the records of the instances of each."""

    regions: tuple[RegionAbroad, ...] = ()
    records: tuple[tuple[str, InstanceRecord], ...] = ()


def region_at(subject: str) -> str:
    """The region that said what is stored under a subject."""
    return subject.split(".")[1]


async def read_abroad(jetstream: JetStream, own: str, *, timeout: float) -> Abroad:
    """The other regions as this one knows them.

    Args:
        own: the region that is asked.

    Raises:
        NoStream: nobody in this region has looked abroad yet.
        Unavailable: not all could be read within `timeout` seconds.
    """
    heard: dict[str, StoredMessage] = {}

    def keep(message: StoredMessage) -> None:
        if region_at(message.subject) != own:
            heard[message.subject] = message

    await read_until(
        jetstream,
        ABROAD_STREAM.name,
        keep,
        timeout=timeout,
        last_per_subject=True,
        on_restart=heard.clear,
    )
    last: dict[str, float] = {}
    records: list[tuple[str, InstanceRecord]] = []
    for subject, message in heard.items():
        region = region_at(subject)
        last[region] = max(last.get(region, 0.0), message.time)
        record = None if message.is_marker else record_of(message)
        if record is not None:
            records.append((region, record))
    now = unix_time()
    regions = (RegionAbroad(name, max(0.0, now - time)) for name, time in sorted(last.items()))
    return Abroad(tuple(regions), tuple(records))
