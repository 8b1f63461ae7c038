"""A caller dies, freezes or is cut off: the work that it asked for stops, down to the last hop."""

from __future__ import annotations

import asyncio
import time

import pytest
from nats.aio.client import Client
from tests.conditions import Stopwatch, eventually

from dynbus import Runtime, call_options
from dynbus.actors.chaos.proxy import Proxy
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.liveness import RECONNECT_GRACE

from .observation import holds_as_before, leftovers, no_handler_runs, resident
from .processes import Process, Processes
from .workload import Count, Source

pytestmark = pytest.mark.anyio

STOPPED_WITHIN = 2.5
"""Two seconds, and what a busy machine and the question itself add to them."""


@pytest.mark.parametrize(
    "actor",
    [
        pytest.param(
            "Source",
            marks=pytest.mark.nightly(
                "tests/scenarios/test_caller_death.py::test_the_handlers_of_a_caller_that_dies_during_an_outage_stop_soon_after_it"
            ),
        ),
        "Top",
    ],
)
async def test_the_handlers_of_a_killed_caller_are_cancelled_down_to_the_grandchildren(
    own_server: RunningServer, processes: Processes, actor: str
) -> None:
    await processes.worker(own_server.url, "Source")
    if actor == "Top":
        await processes.worker(own_server.url, "Relay")
        await processes.worker(own_server.url, "Top")
    caller = await processes.caller(own_server.url, actor, streams=20)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        assert (await source.journal()).running == 20

        caller.kill()
        took = await eventually(no_handler_runs(source))
        journal = await source.journal()

    assert took < STOPPED_WITHIN
    assert len(journal.cancelled) + len(journal.finished) == 20


@pytest.mark.nightly(
    "tests/bus/serving/test_server.py::test_of_a_caller_that_is_gone_it_is_said_who_it_was_and_what_became_of_its_calls",
    "tests/bus/serving/test_control.py::test_a_call_that_ended_because_nobody_listed_it_did_begin",
)
async def test_the_handlers_of_a_frozen_caller_are_cancelled_and_it_gets_an_error_once_it_thaws(
    own_server: RunningServer, processes: Processes
) -> None:
    await processes.worker(own_server.url)
    caller = await processes.caller(own_server.url, "Source", streams=20)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)

        caller.freeze()
        took = await eventually(no_handler_runs(source))
        caller.thaw()
        status = await caller.ended()

    assert took < STOPPED_WITHIN
    assert status != 0
    assert "StreamLost" in caller.output


@pytest.mark.nightly(
    "tests/bus/serving/test_server.py::test_of_a_caller_that_is_gone_it_is_said_who_it_was_and_what_became_of_its_calls"
)
async def test_the_handlers_of_a_caller_that_is_cut_off_for_good_are_cancelled(
    own_server: RunningServer, processes: Processes
) -> None:
    await processes.worker(own_server.url)
    async with Proxy(own_server.port) as proxy, Runtime.connect(own_server.url) as runtime:
        await processes.caller(proxy.url, "Source", streams=20)
        source = runtime.client(Source)

        proxy.refuse()
        proxy.cut()
        took = await eventually(no_handler_runs(source))

    assert took < STOPPED_WITHIN


async def test_the_handlers_of_a_caller_that_dies_during_an_outage_stop_soon_after_it(
    own_server: RunningServer, processes: Processes
) -> None:
    async with Runtime.connect(own_server.url) as serving:
        await serving.start(Source)
        source = serving.client(Source)
        caller = await processes.caller(own_server.url, "Source", streams=20)
        connected: list[tuple[float, Stopwatch]] = []
        serving.bus.data.on_state(lambda _: connected.append((time.monotonic(), Stopwatch())))

        own_server.kill()
        caller.kill()
        await own_server.start()
        await eventually(lambda: serving.is_connected)
        await eventually(no_handler_runs(source))
        begun, watch = connected[-1]
        took, unhindered = time.monotonic() - begun, watch.seconds()
        journal = await source.journal()

    # A caller that died looks like one that is about to come back.
    assert took >= RECONNECT_GRACE
    assert unhindered < 4.0
    assert len(journal.cancelled) == 20


async def test_a_caller_that_is_back_within_two_and_a_half_seconds_of_an_outage_loses_nothing(
    own_server: RunningServer,
) -> None:
    async with (
        Proxy(own_server.port) as proxy,
        Runtime.connect(own_server.url) as serving,
        Runtime.connect(proxy.url) as calling,
    ):
        await serving.start(Source)
        source = calling.client(Source)
        received: list[int] = []

        async def read() -> None:
            with call_options(wait=60.0):
                stream = source.count(Count(items=500, pause=0.01))
            async for item in stream:
                received.append(item.index)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            await eventually(lambda: len(received) > 10)
            proxy.refuse()
            own_server.kill()
            await own_server.start()
            await eventually(lambda: serving.is_connected)
            await asyncio.sleep(2.2)
            proxy.refuse(False)

    assert received == list(range(500))


async def test_a_plain_client_that_dies_is_noticed_at_the_next_item(
    own_server: RunningServer, processes: Processes
) -> None:
    await processes.worker(own_server.url)
    plain = Client()
    await plain.connect(own_server.url)
    inbox = plain.new_inbox()
    subscription = await plain.subscribe(inbox)  # pyright: ignore[reportUnknownMemberType]
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        with call_options(wait=60.0):
            await source.where()
        request = b'{"items": 1000000, "pause": 0.02}'
        await plain.publish("scenario.Source.count", request, reply=inbox)
        await subscription.next_msg(timeout=60)
        assert (await source.journal()).running == 1

        await plain.close()
        took = await eventually(no_handler_runs(source))

    assert took < 1.0


async def test_a_plain_client_cannot_end_streams_by_answering_an_item(
    own_server: RunningServer, processes: Processes
) -> None:
    await processes.worker(own_server.url)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        with call_options(wait=60.0):
            await source.where()
        plain = Client()
        await plain.connect(own_server.url)
        inbox = plain.new_inbox()
        subscription = await plain.subscribe(inbox)  # pyright: ignore[reportUnknownMemberType]
        await plain.publish("scenario.Source.count", b'{"items": 20, "pause": 0.02}', reply=inbox)

        items = 0
        while True:
            message = await subscription.next_msg(timeout=60)
            if not message.data:
                break
            items += 1
            await message.respond(b"thanks")
        await plain.close()

    assert items == 20
    assert message.headers is None


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_100_callers_killed_at_once_leave_nothing_of_their_10_000_streams(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        with call_options(wait=60.0):
            start = await source.census()
        sizes = [resident(worker.pid)]
        blocks = [start.blocks]
        for _ in range(2):
            callers = await begin_callers(own_server.url, processes, pairs=50)
            assert (await source.journal()).running == 10_000
            peak = resident(worker.pid)

            for caller in callers:
                caller.kill()
            took = await eventually(no_handler_runs(source))
            await eventually(holds_as_before(start, source))
            sizes.append(resident(worker.pid))
            blocks.append((await source.census()).blocks)
            print(f"10,000 handlers stopped in {took:.2f} s; MiB at the peak: {peak}")
            assert took < STOPPED_WITHIN
        print(f"MiB: {sizes}, blocks of memory: {blocks}")

    # An instance knows the last 8192 requests of dead callers, should one of them come back.
    assert blocks[1] - blocks[0] < 3 * 8192
    assert abs(blocks[2] - blocks[1]) < 1000
    # The allocator keeps pages of the peak; a second peak needs no more.
    assert sizes[2] <= 1.1 * sizes[1]


async def begin_callers(url: str, processes: Processes, pairs: int) -> list[Process]:
    """Callers with 100 quiet streams each, once each stream has had an item."""
    callers: list[Process] = []
    for _ in range(pairs):
        # Two at a time: a hundred Pythons that start would starve those that run.
        pair = [processes.begin_caller(url, "Source", streams=100, pause=5.0) for _ in range(2)]
        for caller in pair:
            await caller.says("streaming")
        callers += pair
    return callers


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_100_callers_killed_one_after_the_other_leave_nothing_running(
    own_server: RunningServer, processes: Processes
) -> None:
    async with Runtime.connect(own_server.url) as runtime:
        await runtime.start(Source, instance_id="source")
        source = runtime.client(Source)
        for _ in range(100):
            caller = await processes.caller(own_server.url, "Source", streams=100)
            caller.kill()
            took = await eventually(no_handler_runs(source))
            assert took < STOPPED_WITHIN
            await eventually(lambda: not leftovers(runtime))
        await asyncio.sleep(0)
