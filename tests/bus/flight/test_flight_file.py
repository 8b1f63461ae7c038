"""A flight in a file: what is read is what was written, and what is damaged is told."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dynbus.bus.errors import ConfigError
from dynbus.bus.flight import FlightHead, read_flight, write_flight
from dynbus.bus.flight.flight_file import MAGIC
from dynbus.bus.flight.records import FlightMessage, encode_records, entries_of

HEAD = FlightHead("demo", 1.0, 2.0, "0.1.0")


class Happened(msgspec.Struct, frozen=True, array_like=True, tag="test.happened"):
    number: int


def messages(*firsts: int) -> list[bytes]:
    return [
        encode_records("r", first, 100.0, [(1.0, Happened(first)), (2.0, Happened(first + 1))])
        for first in firsts
    ]


def test_a_file_has_its_entries_and_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.flight"

    # One that was stored twice, one that was not, and one that nobody can read.
    assert write_flight(path, HEAD, [*messages(0, 2, 2), b"?", *messages(6)]) == 5
    flight = read_flight(path)

    assert flight.head == HEAD
    found = [(each.number, each.missing, each.time, each.kind) for each in flight.entries]
    assert [one[:2] for one in found] == [(0, 0), (1, 0), (2, 0), (3, 0), (6, 2), (7, 0)]
    assert found[0][2:] == (101.0, "test.happened")


def test_the_same_flight_is_the_same_file(tmp_path: Path) -> None:
    for name in "ab":
        write_flight(tmp_path / name, HEAD, messages(0))

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("begin", "end", "said"),
    [
        (b"no" + MAGIC, None, "is no flight: `dynbus record save` makes one"),
        (MAGIC, -20, "cannot be read|ends in the middle"),
        (MAGIC + b"\x1f\x8b", None, "cannot be read"),
        (MAGIC, 0, "is no flight: it has no head"),
    ],
)
def test_a_file_that_is_none_or_damaged_is_told(
    begin: bytes, end: int | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.flight"
    write_flight(path, HEAD, messages(0, 2, 4))
    packed = path.read_bytes().removeprefix(MAGIC)
    path.write_bytes(begin + packed[:end])

    with pytest.raises(ConfigError, match=said):
        list(read_flight(path).entries)


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "a.flight"
    path.write_text("mine")

    with pytest.raises(ConfigError, match="cannot be written: File exists"):
        write_flight(path, HEAD, [])


def test_of_a_file_that_cannot_be_written_to_its_end_no_part_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.flight"

    def fill_the_disk() -> Iterator[bytes]:
        yield from messages(0)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        write_flight(path, HEAD, fill_the_disk())
    assert not path.exists()


def test_a_file_of_a_later_version_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.flight"
    write_flight(path, msgspec.structs.replace(HEAD, version=9, made_by="9.0"), [])

    with pytest.raises(ConfigError, match=r"of version 9, made by dynbus 9\.0, and this one"):
        read_flight(path)


@pytest.mark.parametrize("unix", [math.nan, math.inf, -5.0, 1e18])
def test_what_has_no_time_is_missing(unix: float) -> None:
    good = FlightMessage(
        1, "r", 0, 1000.0, [(1.0, msgspec.Raw(msgspec.msgpack.encode(["test.a"])))]
    )
    bad = FlightMessage(1, "r", 1, unix, good.records)
    last = FlightMessage(1, "r", 2, 1000.0, good.records)

    assert [(one.number, one.missing) for one in entries_of([good, bad, last])] == [(0, 0), (2, 1)]


def test_a_message_without_records_hides_none_that_follow() -> None:
    records = [(1.0, msgspec.Raw(msgspec.msgpack.encode(["test.a"])))]
    messages = [
        FlightMessage(1, "r", 0, 1000.0, records),
        FlightMessage(1, "r", 2**62, 1000.0, []),
        FlightMessage(1, "r", 1, 1000.0, records),
    ]

    assert [one.number for one in entries_of(messages)] == [0, 1]
