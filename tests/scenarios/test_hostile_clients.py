"""Whatever one client says, the others go on without an error and memory stays bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import msgspec
import psutil
import pytest
from tests.conditions import eventually

from dynbus import Runtime, call_options
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.wire import End, Open, Ping, Pong

from .hostile_client import INCARNATION, HostileClient, hostile_client, secret_of
from .processes import Process, Processes
from .workload import Count, Source, payload

pytestmark = pytest.mark.anyio

INSTANCE = "target"
LAST = 10**9
"""The number of the last request of a hostile client."""
SLOWEST = 5.0
"""Seconds that the instance may compute, until it has answered a call while others attack.

On a busy machine these are the same, and time on a clock is not.
"""
PARTIAL_BYTES = 4 * 32 * 1024 * 1024
STREAM_ITEMS = 200
MAX_GROWTH = 96 * 1024 * 1024
"""Bytes of resident memory that an attack may cost."""


class GoodCaller:
    """Calls without a pause, in the way of any other client.

    Attributes:
        calls: how many have ended well.
        slowest: seconds that the instance computed during the slowest call.
    """

    def __init__(self, runtime: Runtime, worker: Process) -> None:
        self._worker = psutil.Process(worker.pid)
        self.source = runtime.client(Source)
        self.calls = 0
        self.slowest = 0.0

    async def call(self) -> None:
        while True:
            begun = self._computed()
            # Nothing may have to be tried again.
            with call_options(retries=0, timeout=20.0):
                assert (await self.source.where()).instance == INSTANCE
            self.slowest = max(self.slowest, self._computed() - begun)
            self.calls += 1
            await asyncio.sleep(0.005)

    def _computed(self) -> float:
        times = self._worker.cpu_times()
        return times.user + times.system

    async def stream(self) -> None:
        while True:
            index = 0
            request = Count(items=STREAM_ITEMS, size=100, pause=0.002)
            async for item in self.source.count(request):
                assert (item.index, item.text) == (index, payload(index, 100))
                index += 1
            assert index == STREAM_ITEMS


@asynccontextmanager
async def calling_well(runtime: Runtime, worker: Process) -> AsyncGenerator[GoodCaller, None]:
    """A caller that must have no error until the block ends, and go on after that."""
    caller = GoodCaller(runtime, worker)
    with call_options(wait=60.0):
        await caller.source.where()
    tasks = [asyncio.create_task(caller.call()), asyncio.create_task(caller.stream())]
    try:
        await eventually(lambda: caller.calls > 5)
        yield caller
        done = caller.calls
        await eventually(
            lambda: caller.calls > done + 20 or any(task.done() for task in tasks),
            20.0,
            what="calls go on",
        )
        for task in tasks:
            if task.done():
                await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


NONE: list[object] = []
EMPTY_OPEN: list[object] = [8, NONE, NONE, 0, 0]


def forged(*frames: object, sender: str) -> bytes:
    return msgspec.msgpack.encode([1, sender, INCARNATION, 0, list(frames)])


def pings(sender: str) -> bytes:
    return forged(*[[10, 1]] * 346_000, sender=sender)


def empty_opens(sender: str) -> bytes:
    return forged(*[EMPTY_OPEN] * 173_000, sender=sender)


def as_many_pings_as_a_message_may_hold(sender: str) -> bytes:
    return forged(*[[10, 1]] * 8192, sender=sender)


def as_many_opens_as_a_message_may_hold(sender: str) -> bytes:
    return forged(*[EMPTY_OPEN] * 8192, sender=sender)


def questions(sender: str) -> bytes:
    return forged(*[[6, number, secret_of(number), 1, 0] for number in range(8192)], sender=sender)


def long_lists(sender: str) -> bytes:
    calls = [[number, 0] for number in range(10**6, 10**6 + 16_000)]
    done = [[number, secret_of(number)] for number in range(16_000)]
    return forged([8, calls, done, 10**6, None], sender=sender)


async def open_calls(client: HostileClient, count: int) -> None:
    """Have so many calls open at the instance."""
    for number in range(1, count + 1):
        client.listed[number] = 0
        client.request(number, b'{"seconds": 600, "tag": "hostile"}')
    await client.connection.barrier()


def memory_of(process: Process) -> int:
    return psutil.Process(process.pid).memory_info().rss


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "make",
    [
        pings,
        empty_opens,
        pytest.param(
            as_many_pings_as_a_message_may_hold,
            marks=pytest.mark.nightly(
                "tests/scenarios/test_hostile_clients.py::test_one_message_of_whatever_size_keeps_nobody_from_the_instance",
                "tests/bus/test_inbox.py::test_one_thing_is_taken_however_much_it_costs",
            ),
            id="as_many_pings_as_a_message_may_hold",
        ),
        pytest.param(
            as_many_opens_as_a_message_may_hold,
            marks=pytest.mark.nightly(
                "tests/scenarios/test_hostile_clients.py::test_one_message_of_whatever_size_keeps_nobody_from_the_instance",
                "tests/bus/test_inbox.py::test_one_thing_is_taken_however_much_it_costs",
            ),
            id="as_many_opens_as_a_message_may_hold",
        ),
        questions,
        long_lists,
    ],
    ids=lambda make: make.__name__,
)
async def test_one_message_of_whatever_size_keeps_nobody_from_the_instance(
    own_server: RunningServer, processes: Processes, make: Callable[[str], bytes]
) -> None:
    worker = await processes.worker(own_server.url, instance_id=INSTANCE)
    async with (
        Runtime.connect(own_server.url) as runtime,
        hostile_client(own_server.url, INSTANCE) as hostile,
    ):
        async with calling_well(runtime, worker) as caller:
            await open_calls(hostile, 1000)
            await eventually(lambda: has_begun(caller, 256))
            before = memory_of(worker)
            data = make(hostile.base)
            for _ in range(20):
                hostile.say_bytes(data)
            await all_is_read(hostile)
        after = memory_of(worker)

    assert "Traceback" not in worker.output
    assert caller.slowest < SLOWEST
    assert after - before < MAX_GROWTH


async def has_begun(caller: GoodCaller, count: int) -> bool:
    return (await caller.source.journal()).begun.count("hostile") >= count


async def all_is_read(hostile: HostileClient) -> None:
    """Wait until the instance has taken in all that was sent, on both of its connections."""
    await is_read(hostile, LAST)
    # Not acknowledged: the instance knows the client and answers.
    hostile.listed[LAST] = 0

    def is_answered() -> bool:
        # The server cuts a lane off for which it holds too much, and a ping may be in that.
        hostile.say(Ping(77))
        return Pong(77) in hostile.control_frames

    await eventually(is_answered, 60.0)


async def is_read(hostile: HostileClient, number: int) -> None:
    """Wait until the instance has read all requests so far, with one of this number."""
    await hostile.connection.barrier(timeout=60.0)
    hostile.request(number, b"null", endpoint="where")

    def is_answered() -> bool:
        frames = hostile.result_frames
        return any(isinstance(frame, End) and frame.number == number for frame in frames)

    await eventually(is_answered, 60.0)


@pytest.mark.nightly(
    "tests/bus/serving/test_partial_requests.py::test_a_client_may_have_so_many_parts_here_however_small",
)
@pytest.mark.timeout(180)
async def test_empty_parts_of_requests_that_never_become_whole_keep_nobody_waiting(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url, instance_id=INSTANCE)
    async with (
        Runtime.connect(own_server.url) as runtime,
        hostile_client(own_server.url, INSTANCE) as hostile,
    ):
        async with calling_well(runtime, worker) as caller:
            before = memory_of(worker)
            for number in range(1, 40_001):
                hostile.request(number, b"", PART="1/2")
                if number % 10_000 == 0:
                    # No faster than the instance reads: the server would cut it off.
                    await is_read(hostile, LAST + number)
            await all_is_read(hostile)
        after = memory_of(worker)

    assert "Traceback" not in worker.output
    assert caller.slowest < SLOWEST
    assert after - before < MAX_GROWTH


@pytest.mark.nightly(
    "tests/bus/serving/test_partial_requests.py::test_all_clients_together_may_have_so_many_requests",
    "tests/scenarios/test_partial_requests.py::test_a_client_that_completes_no_request_is_refused_more",
)
@pytest.mark.timeout(180)
async def test_requests_that_never_become_whole_take_a_bounded_space_whoever_sends_them(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url, instance_id=INSTANCE)
    async with (
        Runtime.connect(own_server.url) as runtime,
        hostile_client(own_server.url, INSTANCE) as hostile,
    ):
        async with calling_well(runtime, worker) as caller:
            before = memory_of(worker)
            bases = [f"_R.-.{name:032}" for name in range(12)]
            for turn in range(30):
                for base in bases:
                    number = 1 + turn // 20
                    data = b"x" * 1_000_000
                    hostile.request(number, data, base=base, PART=f"{turn + 1}/100")
                    hostile.say(Open(1, [(1, 0), (2, 0)], []), base=base)
                # No faster than the instance reads: the server would cut it off.
                await is_read(hostile, LAST + 1 + turn)
            await all_is_read(hostile)
        after = memory_of(worker)

    assert caller.slowest < SLOWEST
    assert after - before < PARTIAL_BYTES + MAX_GROWTH


@pytest.mark.nightly(
    "tests/bus/serving/test_remembered_requests.py::test_however_many_clients_there_are_the_memory_is_bounded",
    "tests/bus/test_wire.py::test_a_message_with_more_than_is_ever_needed_is_none",
)
@pytest.mark.timeout(180)
async def test_acknowledgements_of_whatever_size_are_not_kept(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url, instance_id=INSTANCE)
    async with (
        Runtime.connect(own_server.url) as runtime,
        hostile_client(own_server.url, INSTANCE) as hostile,
    ):
        async with calling_well(runtime, worker) as caller:
            await open_calls(hostile, 1)
            before = memory_of(worker)
            for number in range(300):
                done = [[10**6 + number, b"x" * 1_000_000]]
                hostile.say_bytes(forged([8, [[1, 0]], done, 0, None], sender=hostile.base))
                done = [[10**6 + 1000 * number + one, secret_of(one)] for one in range(1000)]
                hostile.say_bytes(forged([8, [[1, 0]], done, 0, None], sender=hostile.base))
            await all_is_read(hostile)
        after = memory_of(worker)

    assert caller.slowest < SLOWEST
    assert after - before < MAX_GROWTH
