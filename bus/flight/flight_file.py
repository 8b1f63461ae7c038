"""A flight as one file: what is in the stream of a namespace between two times, compressed.

The first line says what it is; behind it is gzip, in which each message has four bytes of length
before it, the head first.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec

from dynbus.bus.errors import ConfigError

from .records import VERSION, Entry, decode_message, entries_of

MAGIC: Final = b"dynbus flight 1\n"
LONGEST: Final = 64 * 1024**2
"""Bytes of a message in a file; a longer one is not what a recorder wrote."""


class FlightHead(msgspec.Struct, frozen=True):
    """The beginning of a file.

    Attributes:
        since, until: Unix seconds between which it was asked for.
        made_by: the version of dynbus that wrote it.
    """

    namespace: str
    since: float
    until: float
    made_by: str
    version: int = VERSION


class FlightFile(NamedTuple):
    """A file that was opened: its head, and its entries as they are read."""

    head: FlightHead
    entries: Iterator[Entry]


_head = msgspec.msgpack.Decoder(FlightHead)


def write_flight(path: Path, head: FlightHead, messages: Iterable[bytes]) -> int:
    """Write a file with the messages of a stream, as they are; how many. Where that fails, no part
    of it is left.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with path.open("xb") as plain:
            try:
                return _write_all(plain, head, messages)
            except BaseException:
                path.unlink()
                raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def read_flight(path: Path) -> FlightFile:
    """Open a file; its entries are read while they are asked for.

    Raises:
        ConfigError: it cannot be read, or is no flight; also while the entries are asked for.
    """
    messages = _messages(path)
    first = next(messages, b"")
    try:
        head = _head.decode(first)
    except (msgspec.DecodeError, RecursionError):
        raise ConfigError(f"{path} is no flight: it has no head") from None
    if head.version != VERSION:
        raise ConfigError(
            f"{path} is a flight of version {head.version}, made by dynbus {head.made_by}, and "
            f"this one reads version {VERSION}"
        )
    known = (decoded for data in messages if (decoded := decode_message(data)) is not None)
    return FlightFile(head, entries_of(known))


def _write_all(plain: BinaryIO, head: FlightHead, messages: Iterable[bytes]) -> int:
    count = 0
    plain.write(MAGIC)
    # Without its name and the time: the same flight is the same file.
    with gzip.GzipFile("", "wb", fileobj=plain, mtime=0) as packed:
        _write(packed, msgspec.msgpack.encode(head))
        for message in messages:
            _write(packed, message)
            count += 1
    # What does not fit on the disk any more is known here.
    plain.flush()
    return count


def _write(packed: gzip.GzipFile, data: bytes) -> None:
    packed.write(len(data).to_bytes(4, "big") + data)


def _messages(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as plain:
            if plain.read(len(MAGIC)) != MAGIC:
                raise ConfigError(f"{path} is no flight: `dynbus record save` makes one")
            with gzip.GzipFile(fileobj=plain) as packed:
                while length := packed.read(4):
                    size = int.from_bytes(length, "big")
                    if len(length) < 4 or size > LONGEST:
                        raise ConfigError(f"{path} is damaged: it has no whole message")
                    data = packed.read(size)
                    if len(data) < size:
                        raise ConfigError(f"{path} ends in the middle of a message")
                    yield data
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
