"""What queues in order and priorities of jobs promise, in memory and over nats-server."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest

from dynbus.bus.bus import Bus as Presence
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import (
    EndpointName,
    dead_letter_stream,
    job_log_stream,
    lane_of_subject,
    work_stream,
    work_subject,
)
from dynbus.bus.transport import NoStream
from dynbus.bus.work_queue import (
    DeadLetters,
    Job,
    JobEnd,
    JobLog,
    Taker,
    WorkQueue,
    WorkQueueConfig,
)
from dynbus.bus.work_queue.lanes import lane_of_key

from .conftest import Bus, eventually

pytestmark = pytest.mark.anyio

PLAIN = WorkQueueConfig(retry_delay=0.0, in_memory=True)
ORDERED = PLAIN._replace(ordered=True)
PATIENCE = 60.0


async def presence(bus: Bus) -> Presence:
    """One process on the bus under test."""
    one = await Presence.over(BusConfig(), await bus.connect(), await bus.connect())
    await one.data.background.open()
    return one


@pytest.fixture
async def here(bus: Bus) -> AsyncIterator[Presence]:
    one = await presence(bus)
    yield one
    await one.close()


@pytest.fixture
async def name(here: Presence) -> AsyncIterator[EndpointName]:
    """A queue that no other test uses, in a namespace of its own."""
    name = EndpointName.of(f"n{secrets.token_hex(6)}", "Printer", "print")
    await JobLog(here.data.jetstream, name).ensure()
    yield name
    for stream in (work_stream(name), dead_letter_stream(name.namespace), job_log_stream(name)):
        await here.data.jetstream.delete_stream(stream)


async def next_job(taker: Taker) -> Job:
    with anyio.fail_after(PATIENCE):
        return await anext(taker)


def keys_of_two_lanes() -> tuple[str, str]:
    """Two keys that do not share a lane."""
    other = next(key for key in "bcdefgh" if lane_of_key(key) != lane_of_key("a"))
    return "a", other


class Ledger:
    """What was begun of each key, in order, by jobs named `key-number`."""

    def __init__(self) -> None:
        self.begun: dict[str, list[int]] = defaultdict(list)
        self.running: set[str] = set()
        self.overlaps: list[str] = []
        self.ended = 0

    def begin(self, job: Job) -> str:
        key, _, number = job.job_id.rpartition("-")
        if key in self.running:
            self.overlaps.append(job.job_id)
        self.running.add(key)
        if self.begun[key][-1:] != [int(number)]:
            self.begun[key].append(int(number))
        return key

    def end(self, key: str) -> None:
        self.running.discard(key)
        self.ended += 1


@pytest.mark.parametrize("limit", [1, 3, 16])
async def test_jobs_of_a_key_are_done_in_order_and_one_at_a_time_over_all_takers(
    here: Presence, name: EndpointName, bus: Bus, limit: int
) -> None:
    others = [await presence(bus) for _ in range(2)]
    ledger = Ledger()
    keys = [f"k{number}" for number in range(6)]
    queue = WorkQueue(here, name, ORDERED._replace(tries=3))
    for number in range(8):
        for key in keys:
            await queue.put(b"", job_id=f"{key}-{number}", key=key)

    async def run(job: Job) -> None:
        key = ledger.begin(job)
        await anyio.lowlevel.checkpoint()
        if job.tries == 1 and job.job_id.endswith(("2", "5")):
            ledger.running.discard(key)
            await job.nak("again", delay=0.02)
            return
        ledger.end(key)
        await job.ack()

    async def take(process: Presence) -> None:
        own = WorkQueue(process, name, ORDERED._replace(tries=3))
        async with own.take(limit=limit) as taker, anyio.create_task_group() as jobs:
            async for job in taker:
                jobs.start_soon(run, job)

    async with anyio.create_task_group() as tasks:
        for process in (here, *others):
            tasks.start_soon(take, process)
        await eventually(lambda: ledger.ended == 48, PATIENCE)
        tasks.cancel_scope.cancel()
    for process in others:
        await process.close()

    assert ledger.overlaps == []
    assert ledger.begun == {key: list(range(8)) for key in keys}
    assert await DeadLetters(here.data.jetstream, name.namespace).find() == []


async def test_keys_are_done_side_by_side(here: Presence, name: EndpointName) -> None:
    queue = WorkQueue(here, name, ORDERED)
    one, two = keys_of_two_lanes()
    await queue.put(b"", job_id="first", key=one)
    await queue.put(b"", job_id="behind", key=one)
    await queue.put(b"", job_id="beside", key=two)

    async with queue.take(limit=4) as taker:
        held = {(await next_job(taker)).job_id, (await next_job(taker)).job_id}
        with anyio.move_on_after(0.2) as waiting:
            await anext(taker)

    assert held == {"first", "beside"}
    assert waiting.cancelled_caught


async def test_a_job_that_is_tried_again_keeps_those_of_its_key_waiting(
    here: Presence, name: EndpointName
) -> None:
    queue = WorkQueue(here, name, ORDERED)
    await queue.put(b"", job_id="one", key="a")
    await queue.put(b"", job_id="two", key="a")

    async with queue.take(limit=4) as taker:
        await (await next_job(taker)).nak("paper jam", delay=0.3)
        again = await next_job(taker)
        assert (again.job_id, again.tries) == ("one", 2)
        await again.ack()
        assert (await next_job(taker)).job_id == "two"


async def test_what_a_taker_gives_back_in_order_is_no_try_and_comes_first_again(
    here: Presence, name: EndpointName
) -> None:
    queue = WorkQueue(here, name, ORDERED._replace(tries=2))
    await queue.put(b"", job_id="one", key="a")
    await queue.put(b"", job_id="two", key="a")

    for _ in range(5):
        async with queue.take() as taker:
            job = await next_job(taker)
            assert (job.job_id, job.tries) == ("one", 1)

    async with queue.take() as taker:
        await (await next_job(taker)).nak("paper jam")
        last = await next_job(taker)
        assert (last.job_id, last.tries) == ("one", 2)
        await last.nak("paper jam")
        assert (last.end, (await next_job(taker)).job_id) == (JobEnd.DEAD, "two")


async def test_the_next_job_of_a_killed_taker_waits_for_the_one_that_it_held(
    here: Presence, name: EndpointName, bus: Bus
) -> None:
    killed = await presence(bus)
    queue = WorkQueue(here, name, ORDERED)
    for number in range(3):
        await queue.put(b"", job_id=f"job-{number}", key="a")

    async with WorkQueue(killed, name, ORDERED).take(limit=4) as other:
        held = await next_job(other)
        # It is stored who holds it.
        await anyio.sleep(0.6)
        async with queue.take(limit=4) as taker:
            with anyio.move_on_after(0.1) as waiting:
                await anext(taker)
            assert waiting.cancelled_caught
            await killed.lane.run(killed.lane.connection.close())
            await killed.data.close()
            order: list[str] = []
            for _ in range(3):
                async with await next_job(taker) as job:
                    order.append(job.job_id)
    await killed.close()

    assert held.job_id == "job-0"
    assert order == ["job-0", "job-1", "job-2"]


async def test_a_taker_with_no_room_leaves_jobs_of_other_keys_to_others(
    here: Presence, name: EndpointName, bus: Bus
) -> None:
    queue = WorkQueue(here, name, ORDERED)
    other = await presence(bus)
    keys = [f"k{number}" for number in range(8)]
    lanes = len({lane_of_key(key) for key in keys})

    async with queue.take(limit=1) as full:
        waiting = asyncio.ensure_future(next_job(full))
        await asyncio.sleep(0.1)
        for key in keys:
            await queue.put(b"", job_id=key, key=key)
        held = await waiting
        async with WorkQueue(other, name, ORDERED).take(limit=16) as free:
            begun = [await next_job(free) for _ in range(lanes - 1)]
            assert all(job.tries == 1 for job in begun)
        assert held.tries == 1
    await other.close()


async def test_what_would_break_the_order_is_refused(here: Presence, name: EndpointName) -> None:
    ordered, plain = WorkQueue(here, name, ORDERED), WorkQueue(here, name, PLAIN)

    with pytest.raises(ConfigError, match="is ordered: give the key"):
        await ordered.put(b"", job_id="one")
    with pytest.raises(ConfigError, match="go before others of its key"):
        await ordered.put(b"", job_id="one", key="a", priority=1)
    with pytest.raises(ConfigError, match="all later jobs of its lane wait"):
        await ordered.put(b"", job_id="one", key="a", delay=1.0)
    with pytest.raises(ConfigError, match="is not ordered, and has no keys"):
        await plain.put(b"", job_id="one", key="a")
    await ordered.put(b"", job_id="one", key="a")
    with pytest.raises(ConfigError, match="was made with an order of keys .*, and has it not: let"):
        await plain.ensure()
    with pytest.raises(NoStream):
        await here.data.jetstream.publish(work_subject(name, "one", "16"), b"")


async def test_jobs_of_a_higher_priority_begin_first(here: Presence, name: EndpointName) -> None:
    queue = WorkQueue(here, name, PLAIN)
    for job_id, priority in (("low", -1), ("one", 0), ("two", 0), ("high", 5), ("higher", 9)):
        await queue.put(b"", job_id=job_id, priority=priority)
    begun: list[str] = []

    async with queue.take() as taker:
        for _ in range(3):
            async with await next_job(taker) as job:
                begun.append(job.job_id)
        # Also one that is put while others wait.
        async with await next_job(taker) as job:
            begun.append(job.job_id)
            await queue.put(b"", job_id="urgent", priority=1)
        for _ in range(2):
            async with await next_job(taker) as job:
                begun.append(job.job_id)

    assert begun == ["high", "higher", "one", "two", "urgent", "low"]


async def test_idle_takers_hear_of_jobs_of_every_priority(
    here: Presence, name: EndpointName
) -> None:
    queue = WorkQueue(here, name, PLAIN)

    async with queue.take() as taker:
        for priority in (-1, 0, 1, -1):
            waiting = asyncio.ensure_future(next_job(taker))
            await asyncio.sleep(0.1)
            await queue.put(b"", job_id=f"of {priority}".replace(" ", "-"), priority=priority)
            job = await waiting
            assert job.tries == 1
            await job.ack()
            if priority == 1:
                break

    assert queue.ended == {JobEnd.DONE: 3}


async def test_a_dead_letter_comes_back_into_its_lane(here: Presence, name: EndpointName) -> None:
    queue = WorkQueue(here, name, ORDERED)
    await queue.put(b"", job_id="one", key="a")
    letters = DeadLetters(here.data.jetstream, name.namespace)
    async with queue.take() as taker:
        await (await next_job(taker)).bury("no paper")
    (letter,) = await letters.find()

    await letters.redrive(letter)

    (stored,) = await queue.find("one")
    assert lane_of_subject(stored.subject) == lane_of_key("a")
