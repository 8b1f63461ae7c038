"""Jobs that are moved between regions, whatever comes between: each is done, and once."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from tests.conditions import PATIENCE, eventually
from tests.joined_regions import joined_regions

from dynbus import Actor, ConfigError, EndpointName, NoJob, Overloaded, Runtime, handler, signal
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import (
    copy_stream,
    job_log_stream,
    job_log_subject,
    work_stream,
    work_subject,
)
from dynbus.bus.work_queue import TakenOver, TakeOver

from .test_jobs_elsewhere import is_whole, make, reached

pytestmark = pytest.mark.anyio

JOBS = 12


class Mill(Actor, namespace="demo"):
    """Notes what it does, by region."""

    done: ClassVar[list[str]] = []

    @handler(durable=True, ack_wait=1.0)
    async def grind(self, name: str) -> str:
        self.done.append(name)
        return name

    @handler(durable=True, ack_wait=1.0)
    async def wait(self, name: str) -> str:
        self.done.append(name)
        return await signal("go", str)


GRIND = EndpointName.of("demo", "Mill", "grind")
WAIT = EndpointName.of("demo", "Mill", "wait")


class Broken(Exception):
    """Stands for the end of the process."""


class Regions(NamedTuple):
    """Two regions of which each copies the queues of the other."""

    eu: RunningServer
    us: RunningServer
    exits: AsyncExitStack

    async def submit(self, server: RunningServer, names: range, size: int = 0) -> None:
        async with Runtime.connect(server.url, wait=PATIENCE) as customer:
            for name in names:
                await customer.client(Mill).grind.submit(
                    str(name).rjust(size), idempotency_key=f"k-{name}"
                )

    async def work(self, *servers: RunningServer) -> None:
        """Have instances in these regions."""
        for server in servers:
            runtime = await self.exits.enter_async_context(
                Runtime.connect(server.url, wait=PATIENCE)
            )
            await runtime.start(Mill)

    async def limit(self, server: RunningServer, stream: str, **limits: int) -> None:
        async with reached(server) as connection:
            found = await connection.jetstream.api(f"STREAM.INFO.{stream}", {}, timeout=5)
            config = {**found["config"], **limits}
            await connection.jetstream.api(f"STREAM.UPDATE.{stream}", config, timeout=5)

    async def messages(self, server: RunningServer, queue: EndpointName = GRIND) -> int:
        async with reached(server) as connection:
            return (await connection.jetstream.stream_info(work_stream(queue))).messages

    async def are_done(self, count: int = JOBS) -> None:
        """Wait until so many jobs are done and none is left, and see that each was done once."""
        await eventually(lambda: len(set(Mill.done)) >= count, what="all are done")
        for server in (self.eu, self.us):

            async def is_empty(server: RunningServer = server) -> bool:
                return not await self.messages(server)

            await eventually(is_empty, what="no queue has one left")
        assert [name for name, times in Counter(Mill.done).items() if times > 1] == []


@pytest.fixture
async def regions(tmp_path: Path) -> AsyncGenerator[Regions]:
    Mill.done.clear()
    async with joined_regions(tmp_path, ("eu", "us")) as both, AsyncExitStack() as exits:
        eu, us = both["eu"], both["us"]
        for queue in (GRIND, WAIT):
            await make(eu, queue)
            await make(us, queue, ["eu"])
            await make(eu, queue, ["us"])
        yield Regions(eu, us, exits)


async def take_over(
    server: RunningServer,
    region: str,
    *,
    lost: bool = False,
    queue: EndpointName = GRIND,
    breaks_after: int = -1,
    before_leaving: Callable[[], Awaitable[object]] | None = None,
) -> TakenOver:
    """Take over what a region has.

    Args:
        breaks_after: jobs that are put before it is broken off.
        before_leaving: what happens between the reading of the copies and the dropping there.
    """
    async with reached(server) as connection:
        taking = TakeOver(connection, queue, region)
        move, refuse_gap = vars(TakeOver)["_move"], vars(TakeOver)["_refuse_gap"]
        moved = 0

        async def move_some(*given: Any) -> bool:
            nonlocal moved
            if moved == breaks_after:
                raise Broken
            moved += 1
            return bool(await move(taking, *given))

        async def refuse_gap_late(*given: Any) -> None:
            await refuse_gap(taking, *given)
            if before_leaving is not None:
                await before_leaving()

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(taking, "_move", move_some)
            patched.setattr(taking, "_refuse_gap", refuse_gap_late)
            return await taking.run(lost=lost, wait=5.0)


@pytest.mark.parametrize("lost", [True, False])
async def test_a_move_that_is_broken_off_is_finished_by_the_next_one(
    regions: Regions, lost: bool
) -> None:
    eu, us = regions.eu, regions.us
    await regions.submit(eu, range(JOBS))
    await eventually(lambda: is_whole(us, GRIND, JOBS))
    if lost:
        eu.kill()
    with pytest.raises(Broken):
        await take_over(us, "eu", lost=lost, breaks_after=JOBS // 2)
    if lost:
        await eu.start()
    await regions.work(eu, us)
    # Those that are in the copy alone are done nowhere.
    await regions.are_done(JOBS // 2)

    assert len((await take_over(us, "eu", lost=lost)).jobs) == JOBS // 2

    await regions.are_done()


async def test_a_move_into_a_queue_that_is_full_goes_on_when_there_is_room(
    regions: Regions,
) -> None:
    eu, us = regions.eu, regions.us
    await regions.submit(eu, range(JOBS))
    await regions.limit(us, work_stream(GRIND), max_msgs=JOBS // 2)
    with pytest.raises(Overloaded, match=f"{JOBS // 2} of {JOBS} jobs of demo.Mill.grind are here"):
        await take_over(us, "eu")
    await regions.work(eu, us)
    await regions.are_done(JOBS // 2)

    await take_over(us, "eu")

    await regions.are_done()


async def test_jobs_come_back_to_a_region_that_has_not_dropped_them_yet(regions: Regions) -> None:
    eu, us = regions.eu, regions.us
    await regions.submit(eu, range(JOBS))
    await eventually(lambda: is_whole(us, GRIND, JOBS))
    eu.kill()
    assert len((await take_over(us, "eu", lost=True)).jobs) == JOBS
    await eu.start()

    async def is_back() -> bool:
        async with reached(eu) as connection:
            copy = copy_stream(work_stream(GRIND), "us")
            return (await connection.jetstream.stream_info(copy)).last_sequence >= JOBS

    await eventually(is_back, what="the copies in eu have what us has")

    taken = await take_over(eu, "us")

    assert len(taken.jobs) == JOBS
    assert await regions.messages(us) == 0
    await regions.work(eu, us)
    await regions.are_done()


async def test_a_job_that_has_come_back_keeps_what_it_has_done_since(regions: Regions) -> None:
    eu, us = regions.eu, regions.us
    await regions.submit(eu, range(JOBS))
    await take_over(us, "eu")
    with pytest.raises(Broken):
        await take_over(eu, "us", breaks_after=1)
    step = job_log_subject(GRIND, "k-0", "log.step.0")
    async with reached(eu) as connection:
        await connection.jetstream.publish(step, b"{}")

    await take_over(eu, "us")

    async with reached(eu) as connection:
        assert await connection.jetstream.last(job_log_stream(GRIND), step) is not None


async def test_a_full_copy_takes_no_jobs_from_a_region_that_answers_and_leaves_it_what_it_lacks(
    regions: Regions,
) -> None:
    eu, us = regions.eu, regions.us
    copy = copy_stream(work_stream(GRIND), "eu")
    await regions.limit(us, copy, max_bytes=60_000)
    await regions.submit(eu, range(JOBS), 8000)
    await eventually(lambda: is_whole(us, GRIND, JOBS))
    with pytest.raises(ConfigError, match="lacks 5 jobs that region eu has"):
        await take_over(us, "eu")
    assert (await regions.messages(eu), await regions.messages(us)) == (JOBS, 0)

    eu.kill()
    taken = await take_over(us, "eu", lost=True)
    await eu.start()
    await regions.work(eu, us)

    assert (len(taken.jobs), taken.full) == (JOBS - 5, (copy,))
    await regions.are_done()


async def test_copies_of_a_queue_that_was_made_again_are_refused(regions: Regions) -> None:
    eu, us = regions.eu, regions.us
    await regions.submit(eu, range(JOBS))
    await take_over(us, "eu")
    async with reached(eu) as connection:
        await connection.jetstream.delete_stream(work_stream(GRIND))
    await make(eu, GRIND)
    await regions.submit(eu, range(JOBS, JOBS + 3))

    with pytest.raises(ConfigError, match="is of a stream that was deleted in region eu and made"):
        await take_over(us, "eu")

    assert await regions.messages(eu) == 3


async def test_what_a_job_is_told_while_it_is_moved_it_learns_elsewhere(regions: Regions) -> None:
    eu, us = regions.eu, regions.us
    async with Runtime.connect(eu.url) as customer, Runtime.connect(us.url) as elsewhere:
        wait = customer.client(Mill).wait
        told, ended = [await wait.submit(name, idempotency_key=name) for name in ("told", "ended")]

        async def tell() -> None:
            await told.signal("go", "now")
            assert await ended.cancel()

        taken = await take_over(us, "eu", queue=WAIT, before_leaving=tell)

        assert taken.jobs == ("told",)
        with pytest.raises(NoJob):
            await told.signal("go", "later")
        await regions.work(eu, us)
        assert await elsewhere.job(f"{WAIT}.told", Mill.wait).result(PATIENCE) == "now"
    assert Mill.done == ["told"]


@pytest.mark.parametrize("lost", [True, False])
async def test_a_job_that_no_queue_can_have_is_left_and_named(regions: Regions, lost: bool) -> None:
    eu, us = regions.eu, regions.us
    async with reached(eu) as connection:
        subject = work_subject(GRIND, "odd", "normal")
        await connection.jetstream.publish(subject, b'"odd"', headers={"Dynbus-Job": "two words"})
    await regions.submit(eu, range(JOBS))
    await eventually(lambda: is_whole(us, GRIND, JOBS + 1))
    if lost:
        eu.kill()

    taken = await take_over(us, "eu", lost=lost)

    assert len(taken.jobs) == JOBS
    [(job, why)] = taken.left.items()
    assert (job, "its id is no printable ASCII" in why) == ("odd", True)
    assert any("job odd is left in region eu" in line for line in taken.remarks("eu"))
    if lost:
        await eu.start()
    await regions.work(eu, us)
    # Takers there make it a dead letter.
    await regions.are_done()
