"""Whoever was cut off goes on at once: nothing that was lost waits for a heartbeat."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import Final

import pytest
from tests.bus.near_side import endpoint, until

from dynbus.bus.bus import Bus
from dynbus.bus.calling.caller import Caller
from dynbus.bus.calling.pending_call import CallHead, PendingCall
from dynbus.bus.clock import monotonic
from dynbus.bus.config import load_config
from dynbus.bus.memory.bus import MemoryBus, MemoryConnection
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.serving.server import InstanceServer
from dynbus.testing import run

STREAM: Final = EndpointName("near", "Side", "stream")
ITEMS: Final = 6


async def numbers(gate: asyncio.Event, fill: int) -> AsyncGenerator[bytes, None]:
    """Half of the items before the gate opens, the others behind it."""
    for index in range(ITEMS):
        if index == ITEMS // 2:
            await gate.wait()
        yield str(index).encode().ljust(fill)


async def read(call: PendingCall) -> list[bytes]:
    items: list[bytes] = []
    while new := await call.items():
        items += new
        call.consumed(sum(map(len, new)))
    return [item.strip() for item in items]


async def resumed_after(cut: tuple[int, ...], fill: int, lost: str) -> tuple[list[bytes], float]:
    """What a stream brings over an outage, and the seconds that it needs behind it.

    Args:
        cut: the connections that are cut, in the order in which they come back.
        fill: the bytes of an item.
        lost: when the second half of the items is sent: `early`, just before the cut, of which
            nobody notices anything yet, or `during` the outage.
    """
    server = MemoryBus()
    config = load_config({"stream_window": 16 * 1024}, environment={})
    connections: list[MemoryConnection] = [await server.connect() for _ in range(4)]
    serving = await Bus.over(config, connections[0], connections[1])
    calling = await Bus.over(config, connections[2], connections[3])
    gate = asyncio.Event()

    def count(_: object) -> AsyncGenerator[bytes, None]:
        return numbers(gate, fill)

    stream = endpoint(count, streaming=True, name=STREAM.endpoint)
    instance = InstanceServer(serving, STREAM.component_name.instance("i1"), [stream])
    await instance.start()
    caller = Caller(calling)
    await caller.start()
    try:
        call = caller.begin(CallHead(STREAM, "r1", None, 1, True, {}), "i1", b"")
        reading = asyncio.create_task(read(call))
        await until(lambda: call.reader.next_sequence >= ITEMS // 2)

        if lost == "early":
            with server.partition(*(connections[index] for index in cut)):
                gate.set()
                for _ in range(20):
                    await asyncio.sleep(0)
                for index in cut:
                    connections[index].disconnect()
        for index in cut:
            connections[index].disconnect()
        gate.set()
        # Short enough for nobody to be taken for dead.
        await asyncio.sleep(0.3)
        for index in cut:
            connections[index].reconnect()
            # Time enough for what the others say to find nobody.
            await asyncio.sleep(0.01)
        back = monotonic()
        items = await reading
        return items, monotonic() - back
    finally:
        await caller.close()
        await instance.stop()
        await calling.close()
        await serving.close()


ORDERS = [
    order
    for count in range(1, 5)
    for cut in itertools.combinations(range(4), count)
    for order in itertools.permutations(cut)
]


@pytest.mark.parametrize(
    ("lost", "fill"), [("early", 1), ("during", 10_000)], ids=["early", "during, with credit"]
)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_stream_goes_on_as_soon_as_the_last_connection_is_back(
    order: tuple[int, ...], fill: int, lost: str
) -> None:
    items, after = run(resumed_after(order, fill, lost))

    assert items == [str(index).encode() for index in range(ITEMS)]
    assert after == 0.0
