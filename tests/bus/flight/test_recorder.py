"""What is recorded comes in order, and what could not be sent is missing and said to be."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from dynbus.bus.background import Background
from dynbus.bus.errors import PermissionDenied
from dynbus.bus.flight import recorder as recording
from dynbus.bus.flight.recorder import FlightRecorder
from dynbus.bus.flight.records import Entry, decode_message, entries_of, flight_stream
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.transport import Connection
from dynbus.testing import run


class Happened(msgspec.Struct, frozen=True, array_like=True, tag="test.happened"):
    what: str


@asynccontextmanager
async def recorder_on(connection: Connection) -> AsyncGenerator[FlightRecorder]:
    background = Background("test", lambda error: None)
    await background.open()
    try:
        yield FlightRecorder(connection, background, "demo")
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
