"""Who may publish, and knows the names of others, still cannot speak for the server or for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client
from tests.conditions import eventually

from dynbus import Runtime
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.wire import Heartbeat, Open, encode_batch

from .observation import Prefer
from .stage import Stage
from .workload import Count, Item, Source, Wait

pytestmark = pytest.mark.anyio

NO_RESPONDERS = "NATS/1.0 503\r\n\r\n"


@pytest.fixture
async def forger(own_server: RunningServer, stage: Stage) -> AsyncIterator[Client]:
    """Somebody else on the same server, who knows the reply base of the caller."""
    client = Client()
    await client.connect(own_server.url)
    yield client
    await client.close()


async def say_503(forger: Client, subject: str) -> None:
    """Publish what the server says of a message that found nobody.

    nats-py takes headers for those of a program and writes another status line.
    """
    block = NO_RESPONDERS.encode()
    command = f"HPUB {subject} {len(block)} {len(block)}\r\n".encode() + block + b"\r\n"
    await forger._send_command(command)  # pyright: ignore[reportPrivateUsage]
    await forger.flush()


async def test_a_forged_503_makes_no_request_run_twice(stage: Stage, forger: Client) -> None:
    base = stage.calling.bus.replies.base
    calls = [
        asyncio.create_task(stage.source.work(Wait(seconds=1.0, tag=str(number))))
        for number in range(20)
    ]
    await eventually(lambda: stage.server.execution.load == len(calls))

    for _ in range(3):
        for number in range(100):
            await say_503(forger, f"{base}.{number}")
    await asyncio.gather(*calls)
    journal = await stage.source.journal()

    assert sorted(map(int, journal.begun)) == list(range(20))


async def test_a_forged_503_ends_no_stream(stage: Stage, forger: Client) -> None:
    base = stage.calling.bus.replies.base
    received: list[Item] = []

    async def read() -> None:
        async for item in stage.source.count(Count(items=200, pause=0.01)):
            received.append(item)

    reading = asyncio.create_task(read())
    await eventually(lambda: received)
    while not reading.done():
        for number in range(100):
            await say_503(forger, f"{base}.{number}")
        await asyncio.sleep(0.1)
    await reading

    assert [item.index for item in received] == list(range(200))


async def test_nobody_else_can_say_that_an_instance_is_blocked(
    stage: Stage, forger: Client
) -> None:
    base = stage.calling.bus.replies.base
    instance, incarnation = stage.server.name.instance_id, stage.serving.bus.incarnation
    blocked = Heartbeat(1, 1e9, False, [])
    call = asyncio.create_task(stage.source.work(Wait(seconds=2.0, tag="kept")))
    await eventually(lambda: stage.server.execution.load == 1)

    while not call.done():
        for said in (incarnation, stage.calling.bus.incarnation, ""):
            batch = encode_batch(instance, said, 0, [blocked])
            for lane in ("ctl.f", "f"):
                await forger.publish(f"{base}.{lane}", batch)
        await forger.flush()
        await asyncio.sleep(0.05)
    done = await call

    assert done.instance == instance


async def test_nobody_else_can_say_that_a_caller_has_left_its_calls(
    stage: Stage, forger: Client
) -> None:
    base = stage.calling.bus.replies.base
    server = stage.server
    control = server.name.control_subject
    call = asyncio.create_task(stage.source.work(Wait(seconds=2.0, tag="kept")))
    await eventually(lambda: server.execution.load == 1)

    while not call.done():
        for said in (stage.calling.bus.incarnation, stage.serving.bus.incarnation, ""):
            await forger.publish(control, encode_batch(base, said, 0, [Open(1, [], [])]))
        await forger.flush()
        await asyncio.sleep(0.05)
    journal = await stage.source.journal()

    assert journal.finished == ["kept"]
    await call


async def test_who_borrows_the_name_of_a_caller_takes_nothing_from_it(
    own_server: RunningServer, forger: Client
) -> None:
    async with Runtime.connect(own_server.url) as serving, Runtime.connect(own_server.url) as late:
        await serving.start(Source, instance_id="alone")
        base = late.bus.replies.base
        for number in range(1, 10):
            framing = f"1 {number:032x} 1000 forged"
            await forger.publish(
                "scenario.Source.work.alone",
                b'{"seconds": 3.0}',
                reply=f"{base}.{number}",
                headers={"Dynbus-Frames": framing},
            )
        await forger.flush()

        source = late.client(Source, routing=Prefer("alone"))
        items = [item.index async for item in source.count(Count(items=100, pause=0.02))]

    assert items == list(range(100))
