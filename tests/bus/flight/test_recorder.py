"""What is recorded comes in order, and what could not be sent is missing and said to be."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from dynbus.bus.background import Background
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import PermissionDenied
from dynbus.bus.flight import recorder as recording
from dynbus.bus.flight.recorder import FlightRecorder
from dynbus.bus.flight.records import (
    EVENT,
    Entry,
    decode_event,
    decode_message,
    entries_of,
    flight_stream,
)
from dynbus.bus.flight.sampling import Sampling
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.transport import Connection
from dynbus.testing import run


class Happened(msgspec.Struct, frozen=True, array_like=True, tag="test.happened"):
    what: str


@asynccontextmanager
async def recorder_on(
    connection: Connection, sampling: Sampling | None = None
) -> AsyncGenerator[FlightRecorder]:
    background = Background("test", lambda error: None)
    await background.open()
    try:
        yield FlightRecorder(connection, background, "demo", sampling or Sampling(10**6))
    finally:
        await background.close()


async def recorded(connection: Connection) -> list[Entry]:
    stored = await connection.jetstream.read(flight_stream("demo").name)
    messages = [decode_message(each.data) for each in stored]
    return list(entries_of([each for each in messages if each is not None]))


def whats(entries: list[Entry]) -> list[str]:
    return [msgspec.msgpack.decode(each.body, type=Happened).what for each in entries]


def test_records_come_in_order_with_their_times() -> None:
    async def story() -> list[Entry]:
        connection = await MemoryBus().connect()
        async with recorder_on(connection) as recorder:
            for number in range(1200):
                recorder.note(Happened(str(number)), float(number))
            await anyio.sleep(1.0)
            recorder.note(Happened("last"), 5000.0)
            recorder.close()
            await connection.barrier()
            return await recorded(connection)

    entries = run(story())

    assert whats(entries) == [*map(str, range(1200)), "last"]
    assert [each.number for each in entries] == list(range(1201))
    assert [each.at for each in entries[:2]] == [0.0, 1.0]
    assert {(each.missing, each.kind) for each in entries} == {(0, "test.happened")}


def test_what_is_too_much_or_has_no_way_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_RECORDS", 10)

    async def story() -> tuple[list[Entry], int]:
        connection = await MemoryBus().connect()
        async with recorder_on(connection) as recorder:
            recorder.note(Happened("first"), 0.0)
            await anyio.sleep(1.0)
            for number in range(11):
                recorder.note(Happened(str(number)), 1.0)
            await anyio.sleep(1.0)
            await connection.barrier()
            return await recorded(connection), recorder.lost

    entries, lost = run(story())

    assert whats(entries) == ["first", "10"]
    assert (entries[1].number, entries[1].missing, lost) == (11, 10, 10)


class Long(msgspec.Struct, frozen=True, array_like=True, tag="test.long"):
    blocks: bytes
    output: int


def test_records_that_no_message_can_have_together_come_in_several() -> None:
    async def story() -> tuple[list[Entry], int]:
        connection = await MemoryBus(max_payload=16 * 1024).connect()
        async with recorder_on(connection) as recorder:
            for _ in range(100):
                recorder.note(Long(bytes(4000), 1), 0.0)
            await anyio.sleep(1.0)
            await connection.barrier()
            return await recorded(connection), recorder.lost

    entries, lost = run(story())

    assert [each.number for each in entries] == list(range(100))
    assert lost == 0


@pytest.mark.parametrize("record", [Long(bytes(20_000), 1), Long(b"", 2**64), Happened("\ud800")])
def test_a_record_that_no_message_can_have_is_missing_alone(record: msgspec.Struct) -> None:
    async def story() -> tuple[list[Entry], int]:
        connection = await MemoryBus(max_payload=16 * 1024).connect()
        async with recorder_on(connection) as recorder:
            for number in range(100):
                recorder.note(record if number == 30 else Happened(str(number)), 0.0)
            await anyio.sleep(1.0)
            await connection.barrier()
            return await recorded(connection), recorder.lost

    entries, lost = run(story())

    assert [each.number for each in entries] == [*range(30), *range(31, 100)]
    assert [each.number for each in entries if each.missing] == [31]
    assert lost == 1


def test_nothing_is_recorded_where_the_stream_may_not_be_made(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> int:
        connection = await MemoryBus().connect()

        async def refuse(*_: object, **__: object) -> None:
            raise PermissionDenied("not yours")

        monkeypatch.setattr(connection.jetstream, "ensure_stream", refuse)
        async with recorder_on(connection) as recorder:
            recorder.note(Happened("a"), 0.0)
            await anyio.sleep(1.0)
            recorder.note(Happened("b"), 0.0)
            return recorder.lost

    with caplog.at_level(logging.WARNING):
        assert run(story()) == 2

    assert "an operator makes the stream: `dynbus setup`" in caplog.text


def test_a_recorder_tells_its_share_when_that_changes_and_each_minute() -> None:
    async def story() -> list[Entry]:
        connection = await MemoryBus().connect()
        sampling = Sampling(20)
        async with recorder_on(connection, sampling) as recorder:
            recorder.note(Happened("all"), monotonic())
            await anyio.sleep(1.0)
            for _ in range(70):
                recorder.note(Happened("too many"), monotonic())
            await anyio.sleep(1.0)
            assert [recorder.share(digest) for digest in (3, 4)] == [0, 4]
            for _ in range(64):
                for _ in range(10):
                    recorder.note(Happened("one of four"), monotonic())
                await anyio.sleep(1.0)
            # Though nothing is recorded.
            await anyio.sleep(30.0)
            assert sampling.one_in == 1
            await connection.barrier()
            return await recorded(connection)

    entries = run(story())

    shares = [
        (round(entry.at - entries[0].at), decode_event(entry.body).details["one_in"])
        for entry in entries
        if entry.kind == EVENT
    ]
    assert [one for _, one in shares] == [4, 4, 2, 1]
    assert [at for at, _ in shares[:2]] == [1, 61]
    assert 65 < shares[2][0] < shares[3][0] < 85
    # What is left out is no gap.
    assert {entry.missing for entry in entries} == {0}


def test_the_end_of_a_share_that_was_lost_is_told_again() -> None:
    async def story() -> list[Entry]:
        bus = MemoryBus()
        connection = await bus.connect()
        sampling = Sampling(20)
        async with recorder_on(connection, sampling) as recorder:
            for _ in range(30):
                recorder.note(Happened("too many"), monotonic())
            await anyio.sleep(1.0)
            assert sampling.one_in == 2
            bus.stop()
            # It is told that all are recorded again, and nobody hears it.
            await anyio.sleep(20.0)
            assert sampling.one_in == 1
            bus.start()
            await anyio.sleep(5.0)
            recorder.note(Happened("all"), monotonic())
            await anyio.sleep(1.0)
            await connection.barrier()
            return await recorded(connection)

    told = [decode_event(entry.body) for entry in run(story()) if entry.kind == EVENT]

    assert [event.details["one_in"] for event in told] == [2, 1]
