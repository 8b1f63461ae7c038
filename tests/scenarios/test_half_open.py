"""Links that are cut, delayed, half-open or deaf in one direction, on either side of the broker."""

from __future__ import annotations

import asyncio

import pytest
from tests.conditions import Stopwatch, eventually

from dynbus import DynbusError, Runtime, StreamLost, call_options
from dynbus.actors.chaos.proxy import Proxy
from dynbus.bus.nats.server_process import RunningServer

from .observation import leftovers, no_handler_runs
from .processes import Processes
from .stage import Link
from .workload import Count, Item, Source, Text, Wait, payload

pytestmark = pytest.mark.anyio

DETECTED_WITHIN = 12.0
NOTICED_WITHIN = 2.0
"""Of a silent server while calls are open: 1.5 s, and what a busy machine takes."""
CONNECTIONS = 2
"""Of one process: for data, and for the control lane."""


async def read(source: Source, request: Count, received: list[Item]) -> int:
    async for item in source.count(request):
        assert item.index == len(received)
        assert item.text == payload(item.index, request.size)
        received.append(item)
    return len(received)


async def cut(link: Link) -> None:
    """Cut a link, and wait until its ends are connected again: before, a cut would be none."""
    connected = link.proxy.accepted + CONNECTIONS
    link.proxy.cut()
    await asyncio.sleep(0.5)
    await eventually(lambda: link.proxy.accepted >= connected)


@pytest.mark.parametrize(
    "proxied",
    [
        "caller",
        pytest.param(
            "worker",
            marks=pytest.mark.nightly(
                "tests/bus/nats/test_connection.py::test_a_connection_that_is_cut_again_and_again_comes_back_with_its_subscriptions",
                "tests/bus/test_stream_writer.py::test_resume_sends_again_what_the_reader_lacks",
            ),
        ),
    ],
)
async def test_streams_go_on_byte_exactly_when_the_link_is_cut_again_and_again(link: Link) -> None:
    request = Count(items=300, size=2000, pause=0.01)
    received: list[list[Item]] = [[] for _ in range(16)]
    streams = [asyncio.create_task(read(link.source, request, items)) for items in received]
    await eventually(lambda: all(received))

    for _ in range(4):
        await cut(link)
    counts = await asyncio.gather(*streams)

    assert counts == [300] * 16
    assert leftovers(link.runtime) == {}
    assert link.proxy.accepted >= CONNECTIONS + 4 * CONNECTIONS


@pytest.mark.nightly(
    "tests/bus/calling/test_caller.py::test_after_a_reconnect_every_open_call_asks_for_what_is_missing"
)
async def test_calls_during_cuts_of_the_callers_link_complete(link: Link) -> None:
    cutting = asyncio.create_task(cut_every(link.proxy, 0.3))

    calls = [
        asyncio.create_task(link.source.work(Wait(seconds=number / 100, tag=str(number))))
        for number in range(200)
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    cutting.cancel()
    journal = await link.source.journal()

    assert [result for result in results if isinstance(result, BaseException)] == []
    assert sorted(map(int, journal.begun)) == list(range(200))


async def cut_every(proxy: Proxy, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        proxy.cut()


@pytest.mark.nightly(
    "tests/bus/serving/test_server.py::test_a_request_that_misses_a_part_is_to_be_sent_anew"
)
async def test_a_large_request_whose_parts_are_lost_on_the_way_is_sent_anew(link: Link) -> None:
    link.proxy.delay = 0.005
    size = 8 * 1024 * 1024

    call = asyncio.create_task(link.source.length(Text(text="x" * size)))
    await asyncio.sleep(0.15)
    link.proxy.cut()
    link.proxy.delay = 0.0
    async with asyncio.timeout(60.0):
        length = await call

    assert length == size


async def test_a_half_open_link_of_the_caller_is_noticed_and_replaced(
    own_server: RunningServer, link: Link
) -> None:
    received: list[Item] = []
    stream = asyncio.create_task(read(link.source, Count(items=10**9, pause=0.02), received))
    await eventually(lambda: len(received) > 5)

    link.proxy.freeze()
    watch = Stopwatch()
    await eventually(lambda: not link.runtime.is_connected, DETECTED_WITHIN)
    noticed = watch.seconds()
    async with Runtime.connect(own_server.url) as witness:
        # The instance cannot know better than to take us for dead; that is said in time.
        with call_options(wait=60.0):
            await eventually(no_handler_runs(witness.client(Source)))
    link.proxy.cut()
    link.proxy.thaw()
    await eventually(lambda: link.runtime.is_connected)
    with pytest.raises(StreamLost):
        async with asyncio.timeout(60.0):
            await stream
    done = await link.source.where()

    assert done.instance
    assert noticed < NOTICED_WITHIN


@pytest.mark.nightly(
    "tests/bus/memory/test_faults.py::test_a_partition_that_heals_in_time_is_not_noticed",
    "tests/bus/test_liveness.py::test_several_heartbeats_may_be_lost",
)
async def test_a_link_that_stands_still_for_a_second_costs_nothing(link: Link) -> None:
    received: list[Item] = []
    stream = asyncio.create_task(read(link.source, Count(items=200, pause=0.01), received))
    await eventually(lambda: len(received) > 5)

    for _ in range(2):
        link.proxy.freeze()
        await asyncio.sleep(0.9)
        link.proxy.thaw()
        await asyncio.sleep(0.3)
    count = await stream

    assert count == 200
    assert link.proxy.accepted == CONNECTIONS


async def test_a_broker_that_stands_still_for_three_seconds_ends_no_stream(
    own_server: RunningServer, link: Link
) -> None:
    received: list[Item] = []
    stream = asyncio.create_task(read(link.source, Count(items=500, pause=0.01), received))
    await eventually(lambda: len(received) > 5)

    own_server.pause()
    await asyncio.sleep(3.0)
    own_server.resume()
    count = await stream

    assert count == 500


@pytest.mark.parametrize(
    "direction", ["to_client", pytest.param("to_server", marks=pytest.mark.soak)]
)
async def test_a_link_that_is_deaf_in_one_direction_is_replaced_and_calls_end(
    link: Link, direction: str
) -> None:
    await link.source.where()

    link.proxy.swallow_to_server = direction == "to_server"
    link.proxy.swallow_to_client = direction == "to_client"
    watch = Stopwatch()
    with pytest.raises(DynbusError), call_options(timeout=3.0):
        await link.source.where()
    told = watch.seconds()
    await eventually(lambda: not link.runtime.is_connected, DETECTED_WITHIN)
    link.proxy.swallow_to_server = link.proxy.swallow_to_client = False
    link.proxy.cut()
    await eventually(lambda: link.runtime.is_connected)
    done = await link.source.where()

    assert told < 3.5
    assert done.instance


@pytest.mark.parametrize("proxied", ["worker"])
async def test_the_callers_of_a_worker_behind_a_half_open_link_are_told_in_two_seconds(
    link: Link,
) -> None:
    received: list[Item] = []
    stream = asyncio.create_task(read(link.source, Count(items=10**9, pause=0.02), received))
    await eventually(lambda: len(received) > 5)

    link.proxy.freeze()
    watch = Stopwatch()
    with pytest.raises(StreamLost):
        await stream
    told = watch.seconds()
    count = len(received)
    link.proxy.cut()
    link.proxy.thaw()

    async def serves_again() -> bool:
        try:
            return await no_handler_runs(link.source)()
        except DynbusError:
            return False

    await eventually(serves_again)

    assert told < 2.3
    assert len(received) == count


@pytest.mark.nightly(
    "tests/bus/nats/test_connection.py::test_a_server_that_refuses_for_a_while_is_tried_until_it_takes_us",
    "tests/actors/test_instance.py::test_an_outage_of_its_connection_leaves_it_ready_and_found_again",
)
async def test_a_worker_that_cannot_reconnect_for_a_while_serves_again_by_itself(
    own_server: RunningServer, processes: Processes, proxy: Proxy
) -> None:
    worker = await processes.worker(proxy.url, instance_id="remote", ttl=2.0)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        with call_options(wait=60.0):
            await source.where()

        proxy.refuse()
        proxy.cut()
        await eventually(lambda: not runtime.instance_ids("scenario", "Source"))
        await asyncio.sleep(2.0)
        proxy.refuse(False)
        took = await eventually(
            lambda: runtime.instance_ids("scenario", "Source") == ["remote"], 5.0
        )
        done = await source.where()

    assert done.instance == "remote"
    assert took < 2.0
    assert worker.returncode is None


@pytest.mark.nightly(
    "tests/bus/memory/test_faults.py::test_a_delay_lets_each_message_go_in_its_own_time",
    "tests/bus/test_stream_reader.py::test_a_gap_says_that_the_reader_is_behind_until_it_is_filled",
)
async def test_latency_and_jitter_only_make_streams_slower(link: Link) -> None:
    link.proxy.delay = 0.1
    request = Count(items=50, size=3000, pause=0.01)
    received: list[list[Item]] = [[] for _ in range(8)]

    counts = await asyncio.gather(*(read(link.source, request, items) for items in received))

    assert counts == [50] * 8
