"""An in-memory connection ends whatever waits on it, and its queues keep their order.

What it has in common with a real one is in `contracts`, and its faults in `test_memory.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.clock import JumpingLoop, run
from dynbus.bus.errors import Unavailable
from dynbus.bus.memory.bus import MemoryBus, MemoryConnection
from dynbus.bus.transport import ConnectionState, Message, StreamConfig

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return ("asyncio", {"loop_factory": JumpingLoop})


async def connected() -> tuple[MemoryBus, MemoryConnection]:
    bus = MemoryBus()
    return bus, await bus.connect()


async def test_closing_ends_what_waits_for_an_answer() -> None:
    bus, connection = await connected()
    bus.partition(connection)

    barrier = asyncio.create_task(connection.barrier(timeout=60.0))
    request = asyncio.create_task(connection.jetstream.stream_info("S", timeout=60.0))
    await asyncio.sleep(1.0)
    await connection.close()

    with pytest.raises(Unavailable):
        await barrier
    with pytest.raises(Unavailable):
        await request


async def test_closing_ends_what_waits_for_the_connection() -> None:
    _, connection = await connected()
    connection.disconnect()

    waiting = asyncio.create_task(connection.barrier(timeout=60.0))
    await asyncio.sleep(1.0)
    await connection.close()

    with pytest.raises(Unavailable, match="is closed"):
        await waiting


async def test_an_answer_of_an_earlier_session_is_no_answer() -> None:
    bus, connection = await connected()
    await connection.jetstream.ensure_stream(StreamConfig("S", ("s.>",)))
    bus.delay("_INBOX.>", 2.0)

    waiting = asyncio.create_task(connection.jetstream.publish("s.a", b"", timeout=60.0))
    await asyncio.sleep(1.0)
    connection.disconnect()
    connection.reconnect()

    with pytest.raises(Unavailable, match="broke"):
        await waiting
    await asyncio.sleep(5.0)
    assert connection.state is ConnectionState.CONNECTED


async def test_a_cancelled_request_leaves_nothing_behind() -> None:
    bus, connection = await connected()
    with bus.partition(connection):
        waiting = asyncio.create_task(connection.barrier(timeout=60.0))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait([waiting])

    await connection.barrier()

    assert waiting.cancelled()


async def test_a_listener_that_ended_hears_of_nothing_and_ends_twice() -> None:
    _, connection = await connected()
    heard: list[ConnectionState] = []
    end = connection.on_state(heard.append)

    connection.disconnect()
    end()
    end()
    connection.reconnect()

    assert heard == [ConnectionState.DISCONNECTED]


async def test_a_closed_connection_stays_closed_whatever_the_server_does() -> None:
    bus, connection = await connected()
    heard: list[Message] = []
    connection.subscribe("a", heard.append)

    await connection.close()
    connection.reconnect()
    bus.stop()
    bus.start()
    connection.publish("a", b"")
    await asyncio.sleep(1.0)

    assert connection.state is ConnectionState.CLOSED
    assert (heard, bus.connections) == ([], [])


async def test_a_subscription_that_drains_takes_what_was_on_its_way() -> None:
    _, connection = await connected()
    heard: list[bytes] = []
    subscription = connection.subscribe("a", lambda message: heard.append(message.data))
    connection.publish("a", b"before")

    await subscription.drain()
    connection.publish("a", b"after")
    await connection.barrier()
    await subscription.drain()

    assert heard == [b"before"]


async def test_a_drain_without_its_server_is_bounded_and_ends_delivery() -> None:
    _, connection = await connected()
    heard: list[bytes] = []
    subscription = connection.subscribe("a", lambda message: heard.append(message.data))
    connection.disconnect()

    await subscription.drain(timeout=2.0)
    connection.reconnect()
    connection.publish("a", b"after")
    await connection.barrier()

    assert heard == []
    assert "subscriptions: 0" in repr(connection)


@given(st.lists(st.sampled_from(["publish", "break", "turn", "barrier"]), max_size=40))
def test_whatever_breaks_messages_keep_their_order_and_none_is_doubled(steps: list[str]) -> None:
    async def story() -> tuple[list[int], int]:
        _, connection = await connected()
        heard: list[int] = []
        connection.subscribe("a", lambda message: heard.append(int(message.data)))
        sent = 0
        for step in steps:
            if step == "publish":
                connection.publish("a", b"%d" % sent)
                sent += 1
            elif step == "break":
                connection.disconnect()
                connection.reconnect()
            elif step == "turn":
                await asyncio.sleep(0)
            else:
                await connection.barrier()
        await connection.barrier()
        await connection.barrier()
        return heard, sent

    heard, sent = run(story())

    assert heard == sorted(set(heard))
    assert set(heard) <= set(range(sent))
    if "break" not in steps:
        assert len(heard) == sent
