"""Records of a flight on the wire: numbered by the recorder that made them, many in a message.

A record is a msgspec struct with `array_like` and a tag of its own, which is its kind: readers that
know the kind read it, and others pass it over. A number that is missing is a gap: records that
were too many for their recorder, or a message that the server did not store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias

import msgspec

from dynbus.bus.protocol.names import check_token
from dynbus.bus.transport import StreamConfig, StreamLimits

VERSION: Final = 1
MAX_AGE: Final = 24 * 3600.0
MAX_BYTES: Final = 256 * 1024**2

LATEST: Final = 253_402_300_800.0
"""Unix seconds of the year 10,000: no record is of then."""

Record: TypeAlias = msgspec.Struct


class Entry(NamedTuple):
    """One record as it is read.

    Attributes:
        recorder: of whom it is, a random id.
        number: counts the records of a recorder from 0 on.
        missing: records of the recorder that are missing right before it.
        time: Unix seconds.
        at: the same on the monotonic clock of its process.
        kind: its tag.
        body: the record, as msgpack.
    """

    recorder: str
    number: int
    missing: int
    time: float
    at: float
    kind: str
    body: msgspec.Raw


class FlightMessage(msgspec.Struct, frozen=True, array_like=True):
    """Records of one recorder, in their order.

    Attributes:
        first: the number of the first; the others follow.
        unix: what the monotonic clock of its process lacked of Unix time when they were sent.
        records: each with its time on the monotonic clock.
    """

    version: int
    recorder: str
    first: int
    unix: float
    records: list[tuple[float, msgspec.Raw]]


class _Sent(msgspec.Struct, frozen=True, array_like=True):
    """A `FlightMessage` whose records are still objects."""

    version: int
    recorder: str
    first: int
    unix: float
    records: list[tuple[float, Record]]


_encoder = msgspec.msgpack.Encoder()
_message = msgspec.msgpack.Decoder(FlightMessage)
_parts = msgspec.msgpack.Decoder(list[msgspec.Raw])
_kind = msgspec.msgpack.Decoder(str)


def flight_stream(namespace: str) -> StreamConfig:
    """The stream with the flight of a namespace: the last day of it, as far as 256 MiB reach."""
    return StreamConfig(
        name=f"DYNBUS_FLIGHT_{check_token('namespace', namespace)}",
        subjects=(flight_subject(namespace, "*"),),
        limits=StreamLimits(max_bytes=MAX_BYTES, max_age=MAX_AGE),
        description="dynbus: what processes of the namespace saw and decided",
    )


def flight_subject(namespace: str, recorder: str) -> str:
    """The subject at which a recorder records; `*` for any."""
    return f"_flight.{namespace}.{recorder}"


def encode_records(
    recorder: str, first: int, unix: float, records: list[tuple[float, Record]]
) -> bytes:
    """A message with records."""
    return _encoder.encode(_Sent(VERSION, recorder, first, unix, records))


def decode_message(data: bytes) -> FlightMessage | None:
    """The message in bytes; None for what is none, or of a version that is not known."""
    try:
        message = _message.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    return message if message.version == VERSION else None


def entries_of(messages: Iterable[FlightMessage]) -> Iterator[Entry]:
    """The records of messages, each recorder's in their order.

    A message that comes again is passed over. What was before the first message of a recorder is
    not missing: it was not asked for.
    """
    following: dict[str, int] = {}
    unread: dict[str, int] = {}
    for message in messages:
        recorder, first = message.recorder, message.first
        expected = following.get(recorder, first)
        if first < expected or not message.records:
            continue
        missing = first - expected + unread.pop(recorder, 0)
        for number, (at, body) in enumerate(message.records, first):
            kind, unix = _kind_of(body), at + message.unix
            if not kind or not 0.0 <= unix < LATEST:
                missing += 1
                continue
            yield Entry(recorder, number, missing, unix, at, kind, body)
            missing = 0
        following[recorder] = first + len(message.records)
        if missing:
            unread[recorder] = missing


def _kind_of(body: msgspec.Raw) -> str:
    """The tag of a record; empty for what is none."""
    try:
        parts = _parts.decode(body)
        return _kind.decode(parts[0]) if parts else ""
    except (msgspec.DecodeError, RecursionError):
        return ""
