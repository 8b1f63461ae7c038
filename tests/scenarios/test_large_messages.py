"""Requests, results and items of every size: carried whole, or refused before anything is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from tests.conditions import PATIENCE, eventually

from dynbus import HandlerError, InvalidRequest, PayloadTooLarge, Unavailable, call_options
from dynbus.bus.nats.server_process import RunningServer, run_server

from .observation import leftovers
from .stage import Stage, set_stage
from .workload import Count, Text, Wait, payload

pytestmark = pytest.mark.anyio

MAX_PAYLOAD = 64 * 1024
LIMIT = 1024 * 1024
JSON = len('{"text":""}')


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server that takes messages of 64 KiB, so that the edges are cheap to walk along."""
    config = f"max_payload: {MAX_PAYLOAD}"
    server = await run_server(store_dir=tmp_path / "nats-server", config=config)
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
def settings() -> dict[str, Any]:
    """Limits that are a few messages away, on both sides."""
    return {"max_request_bytes": LIMIT, "max_item_bytes": LIMIT}


def reconnects(stage: Stage) -> int:
    """How often either side lost its connection: what a message over the limit costs."""
    return stage.serving.bus.data.sessions + stage.calling.bus.data.sessions - 2


async def test_requests_of_every_size_around_a_message_arrive_whole(stage: Stage) -> None:
    sizes = [0, 1, *range(MAX_PAYLOAD - 450, MAX_PAYLOAD + 10, 7)]
    sizes += [2 * MAX_PAYLOAD, LIMIT - JSON]

    lengths = [await stage.source.length(Text(text="x" * size)) for size in sizes]

    assert lengths == sizes
    assert reconnects(stage) == 0


async def test_results_of_every_size_around_a_message_arrive_whole(stage: Stage) -> None:
    sizes = [0, 1, *range(MAX_PAYLOAD - 700, MAX_PAYLOAD + 10, 11)]
    sizes += [2 * MAX_PAYLOAD, LIMIT - JSON]

    lengths = [len((await stage.source.grow(size)).text) for size in sizes]

    assert lengths == sizes
    assert reconnects(stage) == 0


@pytest.mark.parametrize("size", [1, 1000, 10_000, MAX_PAYLOAD - 600, MAX_PAYLOAD, 300_000])
async def test_items_of_every_size_arrive_whole_and_in_order(stage: Stage, size: int) -> None:
    count = max(10, 3_000_000 // (size + 100))

    index = 0
    async for item in stage.source.count(Count(items=count, size=size)):
        assert (item.index, item.text) == (index, payload(index, size))
        index += 1

    assert index == count
    assert reconnects(stage) == 0


@pytest.mark.parametrize("over", [1, 10 * LIMIT])
async def test_a_request_over_the_limit_is_refused_before_anything_is_sent(
    stage: Stage, over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.source.where()
    request = Text(text="x" * (LIMIT - JSON + over))
    sent: list[str] = []

    def publish(to: str, *_: object, **__: object) -> None:
        sent.append(to)

    monkeypatch.setattr(stage.calling.bus.data, "publish", publish)

    with pytest.raises(PayloadTooLarge, match=f"max_request_bytes = {LIMIT}") as raised:
        await stage.source.length(request)

    assert not raised.value.started
    assert sent == []
    assert leftovers(stage.calling) == {}


async def test_a_result_over_the_limit_is_an_error_and_not_a_hang(stage: Stage) -> None:
    with pytest.raises(PayloadTooLarge, match="max_item_bytes"):
        await stage.source.grow(LIMIT)
    with pytest.raises(PayloadTooLarge, match="max_item_bytes"):
        async for _ in stage.source.count(Count(items=3, size=LIMIT)):
            pass

    assert (await stage.source.length(Text(text="abc"))) == 3


async def test_headers_count_and_too_many_of_them_are_refused(stage: Stage) -> None:
    with call_options(metadata={"key": "x" * 8000}):
        lengths = [
            await stage.source.length(Text(text="x" * size))
            for size in range(MAX_PAYLOAD - 8800, MAX_PAYLOAD - 7800, 13)
        ]
    with (
        pytest.raises(PayloadTooLarge, match="headers"),
        call_options(metadata={"key": "\U0001f600" * 8000}),
    ):
        await stage.source.length(Text(text="x"))

    assert lengths == list(range(MAX_PAYLOAD - 8800, MAX_PAYLOAD - 7800, 13))
    assert leftovers(stage.calling) == {}


@pytest.mark.parametrize("size", [10, 100_000, 5_000_000])
async def test_an_error_of_any_length_and_spelling_arrives(
    own_server: RunningServer, size: int
) -> None:
    async with set_stage(own_server.url, debug=True) as stage:
        with pytest.raises(HandlerError, match="ValueError"):
            async with asyncio.timeout(60.0):
                await stage.source.raise_error(size)


async def test_an_invalid_request_of_any_length_is_told_as_such(stage: Stage) -> None:
    source = stage.calling.namespace("scenario").component("Source")
    client = await source.endpoint("work").client()

    with pytest.raises(InvalidRequest):
        async with asyncio.timeout(60.0):
            await client.generate({"seconds": "x" * 1_000_000})


async def test_a_plain_client_is_told_when_a_result_is_larger_than_a_message(
    own_server: RunningServer, stage: Stage
) -> None:
    plain = Client()
    await plain.connect(own_server.url)

    fits, exceeds = [
        await plain.request("scenario.Source.grow", str(size).encode(), timeout=PATIENCE)
        for size in (MAX_PAYLOAD - JSON, MAX_PAYLOAD - JSON + 1)
    ]
    stream = plain.new_inbox()
    subscription = await plain.subscribe(stream)  # pyright: ignore[reportUnknownMemberType]
    request = Count(items=3, size=MAX_PAYLOAD).model_dump_json().encode()
    await plain.publish("scenario.Source.count", request, reply=stream)
    last = await subscription.next_msg(timeout=60)
    work = Wait().model_dump_json().encode()
    after = await plain.request("scenario.Source.work", work, timeout=PATIENCE)
    await plain.close()

    assert len(fits.data) == MAX_PAYLOAD
    assert exceeds.data == b""
    assert (exceeds.headers or {})["Nats-Service-Error-Code"] == "413"
    assert (last.headers or {})["Nats-Service-Error-Code"] == "413"
    assert b"instance" in after.data


async def test_no_call_hangs_when_the_server_comes_back_with_a_smaller_limit(
    tmp_path: Path,
) -> None:
    size = 150_000
    server = await run_server(store_dir=tmp_path / "large")
    after: RunningServer | None = None

    async def read(stage: Stage) -> int:
        count = 0
        async for item in stage.source.count(Count(items=1000, size=size, pause=0.05)):
            assert item.text == payload(count, size)
            count += 1
        return count

    try:
        async with set_stage(server.url) as stage:
            stream = asyncio.create_task(read(stage))
            await stage.has_load(1)
            await server.stop()
            # What the handler yields meanwhile was cut for the old limit, and is not sent.
            waiting = stage.server.ledger.calls()[0]
            await eventually(lambda: waiting.reply.paused, what="the stream waits for its reader")
            request = asyncio.create_task(stage.source.length(Text(text="x" * size)))
            after = await run_server(
                server.port, store_dir=tmp_path / "small", config=f"max_payload: {MAX_PAYLOAD}"
            )

            with pytest.raises(PayloadTooLarge, match=f"max_payload = {MAX_PAYLOAD}"):
                async with asyncio.timeout(60.0):
                    await stream
            (told,) = await asyncio.gather(request, return_exceptions=True)
            with call_options(wait=60.0):
                grown = len((await stage.source.grow(size)).text)

            assert told == size or isinstance(told, Unavailable)
            assert grown == size
            await stage.is_quiet()
    finally:
        await server.stop()
        if after is not None:
            await after.stop()


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_every_single_size_around_the_edge_of_a_message_arrives(stage: Stage) -> None:
    for size in range(MAX_PAYLOAD - 1500, MAX_PAYLOAD + 1500):
        assert await stage.source.length(Text(text="x" * size)) == size
        assert len((await stage.source.grow(size)).text) == size
