"""A worker dies or freezes: whoever waits on it is told, and nothing runs twice unasked."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial

import pytest
from tests.conditions import Stopwatch, eventually

from dynbus import NoInstances, Runtime, StreamLost, Unavailable, UnknownOutcome, call_options
from dynbus.bus.nats.api_requests import NoResponders
from dynbus.bus.nats.connection import NatsConnection
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import EndpointName, InstanceName
from dynbus.bus.records.instance_view import SUSPECT_SECONDS

from .observation import Prefer, begun_at, no_handler_runs
from .processes import Processes
from .workload import Count, Item, Source, Wait

pytestmark = pytest.mark.anyio

NOTICED_WITHIN = 2.3
"""Two seconds, and what a busy machine adds to them."""


async def read_until_error(source: Source, received: list[Item]) -> None:
    async for item in source.count(Count(items=10**9, pause=0.01)):
        received.append(item)


async def nobody_is_at(runtime: Runtime, subject: str) -> bool:
    """Whether the server knows of nobody there."""
    connection = runtime.bus.data
    assert isinstance(connection, NatsConnection)
    try:
        await connection.request(subject, b"", timeout=1.0)
    except NoResponders:
        return True
    except Unavailable:
        return False
    return False


async def test_a_stream_of_a_killed_worker_ends_in_stream_lost(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url, instance_id="killed")
    async with Runtime.connect(own_server.url) as runtime:
        received: list[Item] = []
        with call_options(wait=60.0, instance="killed"):
            reading = asyncio.create_task(read_until_error(runtime.client(Source), received))
        await eventually(lambda: len(received) > 10)

        worker.kill()
        watch = Stopwatch()
        with pytest.raises(StreamLost) as raised:
            await reading
        noticed = watch.seconds()

    assert noticed < NOTICED_WITHIN
    assert raised.value.hop == "scenario.Source.count@killed"
    assert [item.index for item in received] == list(range(len(received)))


async def test_a_unary_call_on_a_killed_worker_has_an_unknown_outcome_and_is_not_repeated(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url, instance_id="victim")
    other = await processes.worker(own_server.url, instance_id="other")
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source, routing=Prefer("victim"))
        await runtime.discovery.wait_synchronized(60.0)
        call = asyncio.create_task(source.work(Wait(seconds=30.0, tag="once")))
        with call_options(instance="victim"):
            await eventually(begun_at(source, "once"))

        worker.kill()
        watch = Stopwatch()
        with pytest.raises(UnknownOutcome):
            await call
        noticed = watch.seconds()
        with call_options(instance="other"):
            journal = await source.journal()

    assert noticed < NOTICED_WITHIN
    assert "once" not in journal.begun
    assert other.returncode is None


@pytest.mark.nightly(
    "tests/actors/test_invocation.py::test_a_call_whose_instance_dies_is_repeated_only_where_that_is_safe"
)
async def test_an_idempotent_call_is_repeated_on_another_instance(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url, instance_id="first")
    await processes.worker(own_server.url, instance_id="second")
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source, routing=Prefer("first"))
        await runtime.discovery.wait_synchronized(60.0)
        call = asyncio.create_task(source.repeatable(Wait(seconds=1.0, tag="again")))
        with call_options(instance="first"):
            await eventually(begun_at(source, "again"))

        worker.kill()
        watch = Stopwatch()
        done = await call
        took = watch.seconds()

    assert done.instance == "second"
    assert done.attempt == 2
    assert took < NOTICED_WITHIN + 1.5


@pytest.mark.nightly(
    "tests/actors/test_retry_policy.py::test_what_never_started_goes_on_at_the_next_instance_at_once"
)
async def test_a_request_that_did_not_start_goes_to_the_next_instance(
    own_server: RunningServer, processes: Processes
) -> None:
    workers = [await processes.worker(own_server.url, instance_id=f"w{i}") for i in range(3)]
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        await runtime.discovery.wait_synchronized(60.0)

        workers[0].kill()
        workers[1].kill()
        # What a server sends to a process whose end it has not read of may have been taken.
        for name in ("w0", "w1"):
            subject = EndpointName("scenario", "Source", "where").at(name)
            await eventually(partial(nobody_is_at, runtime, subject))
        watch = Stopwatch()
        places = [(await source.where()).instance for _ in range(20)]
        took = watch.seconds()

    assert set(places) == {"w2"}
    assert took < 1.0


@pytest.mark.nightly(
    "tests/actors/test_absent_instances.py::test_a_call_that_does_not_wait_is_told_at_once_that_the_instance_is_gone",
    "tests/bus/calling/test_caller.py::test_a_call_that_nobody_hears_ends_at_once_and_did_not_start",
)
async def test_when_every_worker_is_dead_a_call_fails_at_once(
    own_server: RunningServer, processes: Processes
) -> None:
    workers = [await processes.worker(own_server.url) for _ in range(2)]
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        await runtime.discovery.wait_synchronized(60.0)
        await source.where()

        for worker in workers:
            worker.kill()
        watch = Stopwatch()
        with pytest.raises((NoInstances, Unavailable)):
            await source.where()
        took = watch.seconds()

        await processes.worker(own_server.url, instance_id="fresh")
        await eventually(lambda: "fresh" in runtime.instance_ids("scenario", "Source"), 1.0)
        done = await source.where()

    # Found out by the heartbeats it would take 1.4 s.
    assert took < 1.0
    assert done.instance == "fresh"


async def test_a_frozen_worker_is_noticed_and_sends_nothing_once_it_thaws(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url, instance_id="frozen")
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        received: list[Item] = []
        with call_options(wait=60.0, instance="frozen"):
            reading = asyncio.create_task(read_until_error(source, received))
            await eventually(lambda: len(received) > 10)

            worker.freeze()
            watch = Stopwatch()
            with pytest.raises(StreamLost):
                await reading
            noticed = watch.seconds()
            count = len(received)
            worker.thaw()
            # The zombie's handler must be told to stop, by our silence about its call.
            journal = await source.journal()
            took = await eventually(no_handler_runs(source))

    assert noticed < NOTICED_WITHIN
    assert len(received) == count
    assert journal.begun == [""]
    assert took < 4.0


async def test_a_stream_goes_on_elsewhere_when_its_worker_is_killed_or_frozen(
    own_server: RunningServer, processes: Processes
) -> None:
    workers = {
        name: await processes.worker(own_server.url, instance_id=name) for name in ("a", "b", "c")
    }
    received: list[Item] = []
    stalls: list[float] = []
    stall = Stopwatch()

    async def read(source: Source) -> None:
        nonlocal stall
        async for item in source.lasting(Count(items=200, pause=0.01)):
            if received and item.instance != received[-1].instance:
                stalls.append(stall.seconds())
            received.append(item)

    async with Runtime.connect(own_server.url) as runtime:
        await runtime.discovery.wait_synchronized(60.0)
        reading = asyncio.create_task(read(runtime.client(Source)))
        for moves, lose, enough in ((1, "kill", 20), (2, "freeze", 60)):
            await eventually(lambda enough=enough: len(received) > enough)  # type: ignore[misc]
            worker = workers[received[-1].instance]
            worker.kill() if lose == "kill" else worker.freeze()
            frozen, stall = worker, Stopwatch()
            await eventually(lambda moves=moves: len(stalls) == moves)  # type: ignore[misc]
        # What the zombie has to say comes while the stream is still read.
        frozen.thaw()
        await reading

    assert [item.index for item in received] == list(range(200))
    assert len({item.instance for item in received}) == 3
    assert all(stall < NOTICED_WITHIN for stall in stalls)


@pytest.mark.nightly(
    "tests/actors/test_absent_instances.py::test_an_instance_that_fell_silent_gets_no_call_while_its_lease_lives",
    "tests/actors/test_absent_instances.py::test_a_silent_instance_is_called_again_once_it_is_heard",
)
async def test_a_frozen_worker_gets_no_more_calls_until_it_is_heard_again(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url, instance_id="frozen", ttl=16.0)
    await processes.worker(own_server.url, instance_id="lively")
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source, routing=Prefer("frozen"))
        await runtime.discovery.wait_synchronized(60.0)

        worker.freeze()
        first = await source.repeatable(Wait())
        begun = time.monotonic()
        places: list[str] = []
        # Its lease lives all the while, and longer than one that nobody listens at is left alone.
        while time.monotonic() - begun < SUSPECT_SECONDS + 2.5:
            places.append((await source.where()).instance)
            await asyncio.sleep(0.1)
        assert runtime.discovery.view.find(InstanceName("scenario", "Source", "frozen")) is not None
        worker.thaw()

        async def chosen_again() -> bool:
            return (await source.repeatable(Wait())).instance == "frozen"

        await eventually(chosen_again)

    assert first.instance == "lively"
    assert set(places) == {"lively"}


@pytest.mark.nightly(
    "tests/scenarios/test_worker_death.py::test_a_stream_goes_on_elsewhere_when_its_worker_is_killed_or_frozen",
    "tests/actors/test_retry_policy.py::test_every_call_comes_to_an_end_and_every_pause_is_bounded",
)
async def test_no_call_hangs_while_workers_come_and_go(
    own_server: RunningServer, processes: Processes
) -> None:
    workers = [await processes.worker(own_server.url) for _ in range(2)]
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        with call_options(wait=60.0):
            await source.where()
        slowest = 0.0
        calls = 0

        async def keep_calling() -> None:
            nonlocal slowest, calls
            while True:
                watch = Stopwatch()
                with suppress(NoInstances, Unavailable, UnknownOutcome), call_options(wait=60.0):
                    await source.where()
                slowest = max(slowest, watch.seconds())
                calls += 1

        calling = [asyncio.create_task(keep_calling()) for _ in range(16)]
        for _ in range(3):
            workers.append(await processes.worker(own_server.url))
            workers.pop(0).kill()
            enough = calls + 100
            await eventually(lambda enough=enough: calls > enough)  # type: ignore[misc]
        for task in calling:
            task.cancel()
        await asyncio.gather(*calling, return_exceptions=True)

    assert slowest < 5.0
