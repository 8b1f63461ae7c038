"""An instance goes away gracefully: what runs finishes, new calls go elsewhere."""

from __future__ import annotations

import asyncio
import time

import pytest
from nats.aio.client import Client
from tests.conditions import PATIENCE, Stopwatch, eventually

from dynbus import Draining, Runtime, StreamLost, call_options
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import InstanceName

from .observation import Prefer, leftovers
from .processes import Processes
from .workload import Count, Done, Item, Source, Wait

pytestmark = pytest.mark.anyio


async def read(source: Source, request: Count, received: list[Item]) -> int:
    async for item in source.count(request):
        received.append(item)
    return len(received)


async def test_running_streams_finish_while_new_calls_go_to_another_instance(
    own_server: RunningServer,
) -> None:
    async with (
        Runtime.connect(own_server.url) as first,
        Runtime.connect(own_server.url) as second,
        Runtime.connect(own_server.url) as calling,
    ):
        leaving = await first.start(Source, instance_id="leaving")
        source = calling.client(Source, routing=Prefer("leaving"))
        received: list[list[Item]] = [[] for _ in range(64)]
        with call_options(wait=60.0):
            streams = [
                asyncio.create_task(read(source, Count(items=100, pause=0.01), items))
                for items in received
            ]
        await eventually(lambda: all(received))
        await second.start(Source, instance_id="staying")
        await calling.discovery.wait_for_instance(
            InstanceName("scenario", "Source", "staying"), timeout=PATIENCE
        )

        watch = Stopwatch()
        stopping = asyncio.create_task(leaving.stop(10.0))
        await eventually(lambda: leaving.server.execution.draining)
        places: set[str] = set()
        while not stopping.done():
            places.add((await source.where()).instance)
            await asyncio.sleep(0.01)
        counts = await asyncio.gather(*streams)
        took = watch.seconds()

        assert counts == [100] * 64
        assert places == {"staying"}
        assert took < 5.0
        assert leftovers(calling) == {}


@pytest.mark.nightly(
    "tests/bus/serving/test_server.py::test_what_still_runs_after_the_grace_ends_in_draining"
)
async def test_what_is_left_after_the_grace_ends_in_draining_and_begun_streams_are_lost(
    own_server: RunningServer,
) -> None:
    async with (
        Runtime.connect(own_server.url) as serving,
        Runtime.connect(own_server.url) as calling,
    ):
        instance = await serving.start(Source)
        source = calling.client(Source)
        received: list[Item] = []
        with call_options(wait=60.0):
            stream = asyncio.create_task(read(source, Count(items=10**9, pause=0.01), received))
            unary = asyncio.create_task(source.work(Wait(seconds=60.0)))
        await eventually(lambda: len(received) > 5)

        begun, watch = time.monotonic(), Stopwatch()
        await instance.stop(0.5)
        took, unhindered = time.monotonic() - begun, watch.seconds()
        with pytest.raises(StreamLost, match="is going away; the stream cannot go on") as lost:
            await stream
        with pytest.raises(Draining) as of_unary:
            await unary

        assert took >= 0.5
        assert unhindered < 5.0
        assert not lost.value.retryable
        assert of_unary.value.retryable
        assert leftovers(calling) == {}


@pytest.mark.nightly(
    "tests/bus/test_context.py::test_the_drain_of_the_instance_shows_while_it_lasts"
)
async def test_a_handler_sees_that_its_instance_drains(own_server: RunningServer) -> None:
    async with Runtime.connect(own_server.url) as runtime:
        instance = await runtime.start(Source)
        source = runtime.client(Source)
        with call_options(wait=60.0):
            call = asyncio.create_task(source.work(Wait(seconds=0.3)))
        await eventually(lambda: instance.server.execution.load == 1)

        await instance.stop(5.0)

        assert (await call).instance == instance.id
        assert instance.id not in runtime.instances


@pytest.mark.nightly(
    "tests/scenarios/test_run.py::test_ctrl_c_in_the_terminal_lets_calls_finish",
    "tests/actors/test_instance.py::test_a_call_that_runs_is_finished_before_on_stop",
)
async def test_a_worker_process_finishes_its_streams_on_sigterm_and_exits(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        received: list[list[Item]] = [[] for _ in range(16)]
        with call_options(wait=60.0):
            streams = [
                asyncio.create_task(read(source, Count(items=100, pause=0.01), items))
                for items in received
            ]
        await eventually(lambda: all(received))

        worker.terminate()
        counts = await asyncio.gather(*streams)
        status = await worker.ended()

    assert counts == [100] * 16
    assert status == 0
    assert "stopped" in worker.output


async def test_a_worker_process_hands_its_streams_on_at_sigterm_after_what_it_has_yielded(
    own_server: RunningServer, processes: Processes
) -> None:
    leaving = await processes.worker(own_server.url, instance_id="leaving")
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source, routing=Prefer("leaving"))
        received: list[list[Item]] = [[] for _ in range(16)]

        async def follow(items: list[Item]) -> None:
            async for item in source.lasting(Count(items=10**9, pause=0.01)):
                items.append(item)
                if item.instance == "staying":
                    return

        reading = [asyncio.create_task(follow(items)) for items in received]
        await eventually(lambda: all(received))
        await processes.worker(own_server.url, instance_id="staying")
        await runtime.discovery.wait_for_instance(
            InstanceName("scenario", "Source", "staying"), timeout=PATIENCE
        )

        watch = Stopwatch()
        leaving.terminate()
        await asyncio.gather(*reading)
        status = await leaving.ended()
        took = watch.seconds()

    for items in received:
        assert [item.index for item in items] == list(range(len(items)))
    assert status == 0
    assert "16 streams are handed on to other instances" in leaving.output
    assert took < 4.0


async def test_plain_requests_are_not_lost_while_one_of_two_instances_drains(
    own_server: RunningServer,
) -> None:
    async with (
        Runtime.connect(own_server.url) as first,
        Runtime.connect(own_server.url) as second,
    ):
        leaving = await first.start(Source, instance_id="leaving")
        await second.start(Source, instance_id="staying")
        plain = Client()
        await plain.connect(own_server.url)
        answers: list[bytes] = []
        enough = asyncio.Event()

        async def keep_asking() -> None:
            # Not cancelled: nats-py's request sometimes swallows that.
            while not enough.is_set():
                answer = await plain.request("scenario.Source.where", b"", timeout=PATIENCE)
                answers.append(answer.data)

        asking = [asyncio.create_task(keep_asking()) for _ in range(8)]
        await eventually(lambda: {place(answer) for answer in answers} == {"leaving", "staying"})

        await leaving.stop(2.0)
        answered = len(answers)
        await eventually(lambda: len(answers) > answered + 100)
        enough.set()
        await asyncio.gather(*asking)
        await plain.close()

    assert {place(answer) for answer in answers} == {"leaving", "staying"}
    assert {place(answer) for answer in answers[-50:]} == {"staying"}


def place(answer: bytes) -> str:
    """The instance that an answer of `where` names; an error has no data and names none."""
    return Done.model_validate_json(answer).instance if answer else "refused"
