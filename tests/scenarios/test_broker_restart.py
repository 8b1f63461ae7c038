"""The broker is killed and comes back: streams go on byte-exactly, calls end, leases stay."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.conditions import Stopwatch, eventually

from dynbus import Runtime, call_options
from dynbus.bus.nats.server_process import RunningServer

from .processes import Processes
from .workload import Count, Done, Item, Source, Wait, payload

pytestmark = pytest.mark.anyio

ITEMS = 300
SIZE = 700


async def read_all(source: Source, number: int) -> list[Item]:
    """Every item of one stream, each checked as it comes."""
    items: list[Item] = []
    async for item in source.count(Count(items=ITEMS, size=SIZE, pause=0.01, tag=str(number))):
        assert item.index == len(items)
        assert item.text == payload(item.index, SIZE)
        items.append(item)
    return items


async def restart_broker(server: RunningServer, outage: float) -> None:
    await asyncio.to_thread(server.kill)
    await asyncio.sleep(outage)
    await server.start()


@pytest.mark.parametrize(
    "outage",
    [
        0.1,
        pytest.param(
            1.5,
            marks=pytest.mark.nightly(
                "tests/scenarios/test_broker_restart.py::test_64_streams_go_on_byte_exactly_over_a_restart_of_the_broker"
            ),
        ),
        *(pytest.param(seconds, marks=pytest.mark.soak) for seconds in (0.0, 3.0)),
    ],
)
async def test_64_streams_go_on_byte_exactly_over_a_restart_of_the_broker(
    own_server: RunningServer, processes: Processes, outage: float
) -> None:
    await processes.worker(own_server.url)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        with call_options(wait=60.0):
            streams = [asyncio.create_task(read_all(source, number)) for number in range(64)]
        await asyncio.sleep(1.0)

        await restart_broker(own_server, outage)
        watch = Stopwatch()
        received = await asyncio.gather(*streams)
        after = watch.seconds()

    assert [len(items) for items in received] == [ITEMS] * 64
    assert after < 12.0


async def port_opens(port: int) -> Stopwatch:
    """Wait until a server that starts takes connections; the watch runs from then on."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.002)
        else:
            writer.close()
            return Stopwatch()


@pytest.mark.nightly(
    "tests/bus/test_reconnects.py::test_a_stream_goes_on_as_soon_as_the_last_connection_is_back"
)
@pytest.mark.parametrize(
    ("restarts", "most"),
    [(5, 2.0), pytest.param(100, 1.0, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
)
async def test_the_last_of_64_streams_goes_on_soon_after_the_broker_is_back(
    own_server: RunningServer, processes: Processes, restarts: int, most: float
) -> None:
    await processes.worker(own_server.url)
    after: list[float] = []
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        heard: list[list[int]] = [[] for _ in range(64)]

        async def read(indices: list[int]) -> None:
            with call_options(wait=60.0):
                stream = source.count(Count(items=10**9, size=100, pause=0.01))
            count = 0
            async for item in stream:
                assert item.index == count
                count += 1
                indices.append(item.index)

        streams = [asyncio.create_task(read(indices)) for indices in heard]
        for _ in range(restarts):
            await eventually(lambda: all(heard))
            await asyncio.to_thread(own_server.kill)
            await asyncio.sleep(random.uniform(0.0, 1.0))
            opening = asyncio.create_task(port_opens(own_server.port))
            await own_server.start()
            watch = await opening
            for indices in heard:
                indices.clear()
            await eventually(lambda: all(heard))
            after.append(watch.seconds())
        for stream in streams:
            stream.cancel()

    after.sort()
    p50, p95 = after[len(after) // 2], after[len(after) * 95 // 100]
    print(f"seconds to the last stream: p50 {p50:.2f}, p95 {p95:.2f}, worst {after[-1]:.2f}")
    assert p95 <= most / 2 or restarts < 20
    assert after[-1] <= most


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_64_streams_go_on_over_20_restarts(
    own_server: RunningServer, processes: Processes
) -> None:
    await processes.worker(own_server.url)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        for _ in range(20):
            with call_options(wait=60.0):
                streams = [asyncio.create_task(read_all(source, number)) for number in range(64)]
            await asyncio.sleep(random.uniform(0.1, 3.0))

            await restart_broker(own_server, random.uniform(0.0, 5.0))
            received = await asyncio.gather(*streams)

            assert [len(items) for items in received] == [ITEMS] * 64


@pytest.mark.nightly(
    "tests/bus/calling/test_caller.py::test_after_a_reconnect_every_open_call_asks_for_what_is_missing",
    "tests/bus/calling/test_call_progress.py::test_credit_is_repeated_to_a_writer_that_sends_nothing",
)
async def test_streams_that_live_on_credit_go_on_over_restarts(
    own_server: RunningServer, processes: Processes
) -> None:
    await processes.worker(own_server.url)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)

        async def read(number: int) -> int:
            with call_options(wait=60.0):
                stream = source.count(Count(items=400, size=40_000, pause=0.01, tag=str(number)))
            count = 0
            async for item in stream:
                assert item.text == payload(count, 40_000)
                count += 1
            return count

        streams = [asyncio.create_task(read(number)) for number in range(8)]
        for _ in range(3):
            await asyncio.sleep(random.uniform(0.5, 1.0))
            await restart_broker(own_server, 0.2)
        counts = await asyncio.gather(*streams)

    assert counts == [400] * 8


async def test_unary_calls_in_flight_over_a_restart_complete(
    own_server: RunningServer, processes: Processes
) -> None:
    await processes.worker(own_server.url)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        with call_options(wait=60.0):
            calls = [
                asyncio.create_task(source.work(Wait(seconds=number / 16, tag=str(number))))
                for number in range(64)
            ]
        await asyncio.sleep(1.0)

        await restart_broker(own_server, 1.0)
        results = await asyncio.gather(*calls)
        journal = await source.journal()

    assert len(results) == 64
    assert sorted(map(int, journal.begun)) == list(range(64))


@pytest.mark.nightly(
    "tests/actors/test_runtime.py::test_who_waits_for_the_bus_goes_on_when_it_is_back",
    "tests/actors/test_retry_policy.py::test_right_after_an_outage_an_absent_instance_is_asked_again_without_counting",
)
async def test_calls_that_begin_during_and_right_after_an_outage_complete(
    own_server: RunningServer, processes: Processes
) -> None:
    await processes.worker(own_server.url)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        with call_options(wait=60.0):
            await source.where()
        calls: list[asyncio.Task[Done]] = []

        async def keep_calling() -> None:
            while True:
                calls.append(asyncio.create_task(source.where()))
                await asyncio.sleep(0.01)

        calling = asyncio.create_task(keep_calling())
        await asyncio.sleep(0.2)
        await restart_broker(own_server, 0.5)
        await asyncio.sleep(1.5)
        calling.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)

    assert [result for result in results if not isinstance(result, Done)] == []


@pytest.mark.nightly(
    "tests/bus/test_instance_view.py::test_a_renewal_in_that_time_saves_the_instance"
)
async def test_an_outage_shorter_than_the_ttl_removes_nobody(
    own_server: RunningServer, processes: Processes
) -> None:
    workers = [processes.begin_worker(own_server.url, ttl=3.0) for _ in range(3)]
    for worker in workers:
        await worker.says("ready")
    async with Runtime.connect(own_server.url) as runtime:
        client = await runtime.namespace("scenario").component("Source").endpoint("where").client()
        known = set(await client.wait_for_instances(timeout=60.0, count=3))
        seen: set[frozenset[str]] = set()

        async def watch() -> None:
            while True:
                seen.add(frozenset(client.instance_ids()))
                await asyncio.sleep(0.01)

        watching = asyncio.create_task(watch())
        await restart_broker(own_server, 2.0)
        await asyncio.sleep(4.0)
        watching.cancel()

    assert seen == {frozenset(known)}
