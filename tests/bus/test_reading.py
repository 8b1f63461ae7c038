"""What a stream holds is read to its end, or as far as it is wanted, in bounded time."""

from __future__ import annotations

import asyncio

import pytest

from dynbus.bus.errors import Unavailable
from dynbus.bus.memory.bus import MemoryBus, MemoryConnection
from dynbus.bus.records.reading import read_latest, read_until
from dynbus.bus.transport import NoStream, StoredMessage, StreamConfig
from dynbus.testing import run

STREAM = StreamConfig("kept", ("kept.>",), marker_ttl=60.0)


async def filled(*subjects: str) -> MemoryConnection:
    connection = await MemoryBus().connect()
    await connection.jetstream.ensure_stream(STREAM)
    for number, subject in enumerate(subjects):
        await connection.jetstream.publish(f"kept.{subject}", str(number).encode())
    return connection


def test_reading_ends_when_all_that_was_there_is_read() -> None:
    async def story() -> tuple[bool, list[bytes]]:
        connection = await filled("a", "b", "a")
        read: list[bytes] = []

        whole = await read_until(
            connection.jetstream, "kept", lambda message: read.append(message.data), timeout=5.0
        )

        await connection.close()
        return whole, read

    assert run(story()) == (True, [b"0", b"1", b"2"])


def test_reading_ends_when_it_is_enough() -> None:
    async def story() -> list[bytes]:
        connection = await filled("a", "b", "a")
        read: list[bytes] = []

        def take(message: StoredMessage) -> bool:
            read.append(message.data)
            return len(read) == 2

        await read_until(connection.jetstream, "kept", take, timeout=5.0)

        await connection.close()
        return read

    assert run(story()) == [b"0", b"1"]


def test_the_latest_are_read_without_what_was_deleted() -> None:
    async def story() -> dict[str, bytes]:
        connection = await filled("a", "b", "a", "c")
        await connection.jetstream.publish("kept.b", b"", headers={"KV-Operation": "DEL"}, ttl=60)

        latest = await read_latest(connection.jetstream, "kept", timeout=5.0)

        await connection.close()
        return {subject: message.data for subject, message in latest.items()}

    assert run(story()) == {"kept.a": b"2", "kept.c": b"3"}


def test_a_stream_that_is_not_there_is_said() -> None:
    async def story() -> None:
        connection = await MemoryBus().connect()
        with pytest.raises(NoStream):
            await read_latest(connection.jetstream, "kept", timeout=5.0)
        await connection.close()

    run(story())


@pytest.mark.parametrize("retry", [False, True])
def test_a_server_that_is_away_is_waited_for_only_when_asked(retry: bool) -> None:
    async def story() -> str:
        connection = await filled("a")
        connection.disconnect()
        asyncio.get_running_loop().call_later(7.0, connection.reconnect)

        try:
            latest = await read_latest(connection.jetstream, "kept", timeout=20.0, retry=retry)
        except Unavailable:
            return "unavailable"
        finally:
            await connection.close()
        return ", ".join(latest)

    assert run(story()) == ("kept.a" if retry else "unavailable")
