"""Records of a flight on the wire: numbered by the recorder that made them, many in a message.

A record is a msgspec struct with `array_like` and a tag of its own, which is its kind: readers that
know the kind read it, and others pass it over. It is none of the garbage collector's (`gc=False`):
thousands wait to be sent, and none refers to itself. A number that is missing is a gap: records
that were too many for their recorder, or a message that the server did not store.
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

FLIGHTS: Final = "_flight.>"
"""The subjects of all flights."""

Record: TypeAlias = msgspec.Struct


Value: TypeAlias = str | int | float | bool

EVENT: Final = "event"
"""The kind of these records."""


class Event(msgspec.Struct, frozen=True, array_like=True, tag=EVENT, gc=False):
    """Something that happened.

    Attributes:
        what: a word and what became of it, such as `instance.ready`.
        who: the address of what it happened to.
        request: the digest of a request's id; empty where it is about none.
        details: numbers, codes and addresses; never a text of a user's.
    """

    what: str
    who: str
    request: str
    details: dict[str, Value]


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


_STREAM: Final = "DYNBUS_FLIGHT_"
_encoder = msgspec.msgpack.Encoder()
_message = msgspec.msgpack.Decoder(FlightMessage)
_parts = msgspec.msgpack.Decoder(list[msgspec.Raw])
_kind = msgspec.msgpack.Decoder(str)
_event = msgspec.msgpack.Decoder(Event)


def flight_stream(namespace: str) -> StreamConfig:
    """The stream with the flight of a namespace: the last day of it, as far as 256 MiB reach."""
    return StreamConfig(
        name=f"{_STREAM}{check_token('namespace', namespace)}",
        subjects=(flight_subject(namespace, "*"),),
        limits=StreamLimits(max_bytes=MAX_BYTES, max_age=MAX_AGE),
        description="dynbus: what processes of the namespace saw and decided",
    )


def namespace_of_flight(stream: str) -> str:
    """The namespace whose flight a stream has; empty for another stream."""
    head, _, namespace = stream.partition(_STREAM)
    return "" if head else namespace


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


def message_at(subject: str, namespace: str, data: bytes) -> FlightMessage | None:
    """The message in bytes that were stored at a subject; None for what is none, and for what
    speaks for another recorder than its subject, which is forged."""
    message = decode_message(data)
    if message is None or subject != flight_subject(namespace, message.recorder):
        return None
    return message


def decode_event(body: msgspec.Raw) -> Event:
    """The event in a record of that kind.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _event.decode(body)


class EntryReader:
    """Reads the records of messages, each recorder's in their order.

    A message that comes again is passed over. What was before the first message of a recorder is
    not missing: it was not asked for.
    """

    def __init__(self) -> None:
        self._following: dict[str, int] = {}
        self._unread: dict[str, int] = {}

    def take(self, message: FlightMessage) -> Iterator[Entry]:
        """The records of the next message."""
        recorder, first = message.recorder, message.first
        expected = self._following.get(recorder, first)
        if first < expected or not message.records:
            return
        missing = first - expected + self._unread.pop(recorder, 0)
        for number, (at, body) in enumerate(message.records, first):
            kind, unix = _kind_of(body), at + message.unix
            if not kind or not 0.0 <= unix < LATEST:
                missing += 1
                continue
            yield Entry(recorder, number, missing, unix, at, kind, body)
            missing = 0
        self._following[recorder] = first + len(message.records)
        if missing:
            self._unread[recorder] = missing


def entries_of(messages: Iterable[FlightMessage]) -> Iterator[Entry]:
    """The records of messages, see `EntryReader`."""
    reader = EntryReader()
    for message in messages:
        yield from reader.take(message)


def _kind_of(body: msgspec.Raw) -> str:
    """The tag of a record; empty for what is none."""
    try:
        parts = _parts.decode(body)
        return _kind.decode(parts[0]) if parts else ""
    except (msgspec.DecodeError, RecursionError):
        return ""
