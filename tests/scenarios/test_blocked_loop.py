"""A handler that blocks its event loop is named, with its stack, and is not taken for dead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable

import msgspec
import pytest
from tests.conditions import Stopwatch, eventually

from dynbus import Runtime, UnknownOutcome, call_options
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.protocol.wire import decode_record, encode_record
from dynbus.bus.records.instance_records import INSTANCES_STREAM, record_subject

from .observation import Prefer
from .processes import Processes
from .workload import Count, Item, Source, Wait

pytestmark = pytest.mark.anyio

BLOCKED = 5.0


async def read_all(stream: AsyncIterable[Item]) -> list[Item]:
    return [item async for item in stream]


async def test_a_handler_that_blocks_its_loop_is_reported_and_its_calls_complete(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url, instance_id="blocked", ttl=3.0)
    # Where a stream would go on that was given up.
    await processes.worker(own_server.url, instance_id="other")
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source, routing=Prefer("blocked"))
        await eventually(lambda: len(runtime.instance_ids("scenario", "Source")) == 2)
        waiting = asyncio.create_task(source.work(Wait(seconds=0.5)))
        lasting = asyncio.create_task(read_all(source.lasting(Count(items=30, pause=0.05))))
        await asyncio.sleep(0.1)
        seen: set[tuple[str, ...]] = set()

        begun, watch = time.monotonic(), Stopwatch()
        blocking = asyncio.create_task(source.block(Wait(seconds=BLOCKED)))
        await worker.says("blocking")
        late = asyncio.create_task(source.where())
        while not blocking.done():
            seen.add(tuple(sorted(runtime.instance_ids("scenario", "Source"))))
            await asyncio.sleep(0.02)
        results = await asyncio.gather(blocking, waiting, late)
        took, unhindered = time.monotonic() - begun, watch.seconds()
        # A stream that could go on elsewhere has no reason to.
        items = await lasting

    assert [(item.index, item.instance) for item in items] == [(n, "blocked") for n in range(30)]
    assert [result.instance for result in results] == ["blocked"] * 3
    assert took >= BLOCKED
    assert unhindered < 2 * BLOCKED
    assert seen == {("blocked", "other")}
    report = worker.output.split("the main loop has been blocked for")
    assert len(report) == 2
    assert "time.sleep(request.seconds)" in report[1]


async def test_a_caller_that_begins_while_the_loop_is_blocked_waits_for_it_too(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url, instance_id="blocked", ttl=3.0)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        with call_options(wait=60.0):
            await source.where()
        begun, watch = time.monotonic(), Stopwatch()
        blocking = asyncio.create_task(source.block(Wait(seconds=BLOCKED)))
        await worker.says("blocking")

        async with Runtime.connect(own_server.url) as stranger:
            late = stranger.client(Source)
            with call_options(wait=60.0):
                items = late.count(Count(items=2))
                done, seen = await asyncio.gather(late.where(), anext(aiter(items)))
        took, unhindered = time.monotonic() - begun, watch.seconds()
        await blocking

    assert done.instance == seen.instance == "blocked"
    assert took >= BLOCKED
    assert unhindered < BLOCKED + 1.5


@pytest.mark.nightly(
    "tests/bus/test_lane.py::test_the_lane_goes_on_while_the_main_loop_is_blocked",
    "tests/bus/test_heartbeats.py::test_heartbeats_are_sent_while_calls_are_open_and_then_no_more",
)
async def test_a_caller_that_blocks_its_loop_keeps_its_streams(
    own_server: RunningServer, processes: Processes
) -> None:
    await processes.worker(own_server.url)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        with call_options(wait=60.0):
            journal = await source.journal()
        working = asyncio.create_task(source.work(Wait(seconds=1.0, tag="kept")))
        await asyncio.sleep(0.1)

        time.sleep(3.0)  # noqa: ASYNC251 - that is the story
        await working
        journal = await source.journal()

    assert journal.finished == ["kept"]


async def test_a_loop_that_is_blocked_beyond_the_limit_is_given_up(
    own_server: RunningServer, processes: Processes
) -> None:
    await processes.worker(own_server.url)
    async with Runtime.connect(own_server.url, stall_limit=1.0) as runtime:
        source = runtime.client(Source)
        with call_options(wait=60.0):
            await source.where()

        begun, watch = time.monotonic(), Stopwatch()
        with pytest.raises(UnknownOutcome):
            await source.block(Wait(seconds=8.0))
        took, unhindered = time.monotonic() - begun, watch.seconds()

    assert took > 1.0
    assert unhindered < 6.0


@pytest.mark.nightly(
    "tests/bus/calling/test_caller.py::test_a_call_of_an_instance_that_is_gone_hears_first_whether_anybody_took_it"
)
async def test_a_caller_whose_loop_was_blocked_hears_first_that_nobody_took_its_request(
    own_server: RunningServer,
) -> None:
    async with (
        Runtime.connect(own_server.url) as serving,
        Runtime.connect(own_server.url) as calling,
    ):
        await serving.start(Source, instance_id="true")
        jetstream = calling.bus.data.jetstream
        stored = await jetstream.last(
            INSTANCES_STREAM.name, record_subject("scenario", "Source", "true")
        )
        record = decode_record(stored.data) if stored is not None else None
        assert record is not None
        # What a killed server brings back: nobody is there.
        ghost = InstanceName("scenario", "Source", "ghost")
        false_record = msgspec.structs.replace(record, instance_id="ghost", incarnation="g")
        await jetstream.publish(record_subject(*ghost), encode_record(false_record))
        await calling.discovery.wait_for_instance(ghost)
        source = calling.client(Source, routing=Prefer("ghost"))

        call = asyncio.create_task(source.where())
        while not calling.caller.open_calls():  # noqa: ASYNC110 - it is there for a moment
            await asyncio.sleep(0)
        time.sleep(3.0)  # noqa: ASYNC251 - that is the story
        done = await call

    assert done.instance == "true"
