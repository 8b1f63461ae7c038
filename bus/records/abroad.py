"""The records of instances of other regions: a bucket that copies theirs, and how old it is.

A region is a JetStream domain: servers that keep streams of their own, and are leaf nodes of the
servers that join the regions. Each keeps a copy of the others' records, so that a call that finds
nobody at home finds out at once who is abroad, and so that a region which is lost or cut off
leaves the copy as its records run out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import ABROAD_BUCKET, TOKEN, InstanceName
from dynbus.bus.protocol.wire import InstanceRecord, decode_record
from dynbus.bus.transport import (
    JetStream,
    NoStream,
    SourceState,
    StoredMessage,
    StreamConfig,
    StreamSource,
)

from .instance_records import INSTANCES_STREAM
from .reading import read_latest

ABROAD_STREAM: Final = f"KV_{ABROAD_BUCKET}"
HEARD_WITHIN: Final = 5.0
"""Seconds within which a region that can be reached says something, five times over."""

_REGION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


def check_region(name: str) -> str:
    """Return the name of a region where it is one.

    Raises:
        ConfigError: it is not of 1 to 32 letters, digits, '_' and '-'.
    """
    if _REGION.fullmatch(name):
        return name
    raise ConfigError(
        f"region {name!r} is not a valid name: use 1 to 32 letters, digits, '_' or '-', beginning "
        "with a letter or a digit, as the JetStream domain of its servers"
    )


def abroad_config(regions: Sequence[str]) -> StreamConfig:
    """The bucket that copies the records of the instances of some regions.

    Raises:
        ConfigError: one of them is no name of a region.
    """
    [records] = INSTANCES_STREAM.subjects
    return INSTANCES_STREAM._replace(
        name=ABROAD_STREAM,
        subjects=(),
        description="dynbus: copies of the records of instances of other regions",
        sources=tuple(
            StreamSource(
                check_region(region),
                INSTANCES_STREAM.name,
                records,
                f"$KV.{ABROAD_BUCKET}.{region}.>",
            )
            for region in sorted(set(regions))
        ),
    )


def check_abroad(own: str, regions: Sequence[str]) -> None:
    """Check that servers of a region may copy from others.

    Args:
        own: the region of the servers; empty for none.

    Raises:
        ConfigError: it has no name, or is among the others.
    """
    if not own:
        raise ConfigError(
            "the server has no JetStream domain, which is the name of its region: write "
            "`jetstream { domain: NAME ... }` in its configuration, docs/guides/regions.md"
        )
    if own in regions:
        raise ConfigError(f"region {own} is that of the server itself: name the others")


def region_at(subject: str) -> str:
    """The region of the instance whose record was copied to a subject."""
    return subject.split(".")[2]


def instance_abroad_at(subject: str) -> InstanceName | None:
    """The instance whose record was copied to a subject; None for any other subject."""
    tokens = subject.split(".")
    if len(tokens) != 6 or not all(map(TOKEN.fullmatch, tokens[2:])):
        return None
    return InstanceName(*tokens[3:])


def record_abroad(message: StoredMessage) -> InstanceRecord | None:
    """The record in a copy; None for one that cannot be read, or that speaks of another instance
    than its subject."""
    record = decode_record(message.data)
    if record is None or record.name != instance_abroad_at(message.subject):
        return None
    return record


async def read_abroad(jetstream: JetStream, *, timeout: float) -> list[tuple[str, InstanceRecord]]:
    """The regions and records of the instances that have a lease in another region.

    Raises:
        NoStream: the servers of this region know no other one.
        Unavailable: not all could be read within `timeout` seconds.
    """
    subject = f"$KV.{ABROAD_BUCKET}.>"
    messages = await read_latest(jetstream, ABROAD_STREAM, subject, timeout=timeout)
    return [
        (region_at(one.subject), record)
        for one in messages.values()
        if (record := record_abroad(one)) is not None
    ]


async def regions_abroad(jetstream: JetStream, *, timeout: float) -> tuple[SourceState, ...]:
    """The other regions, and how long each has been silent; none where no other is known.

    Raises:
        Unavailable: the server did not answer in time.
    """
    try:
        info = await jetstream.stream_info(ABROAD_STREAM, timeout=timeout)
    except NoStream:
        return ()
    return tuple(sorted(info.sources))
