"""What work queues promise, in memory and over nats-server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import anyio
import pytest
from tests.conditions import PATIENCE

from dynbus.bus.background import task_group
from dynbus.bus.bus import Bus as Presence
from dynbus.bus.clock import monotonic
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import (
    ConfigError,
    DeadlineExceeded,
    Overloaded,
    PayloadTooLarge,
    UnknownOutcome,
)
from dynbus.bus.protocol.names import (
    EndpointName,
    cancel_subject,
    dead_letter_stream,
    holder_subject,
    work_stream,
    work_subject,
)
from dynbus.bus.transport import StreamLimits
from dynbus.bus.work_queue import (
    DeadLetters,
    Job,
    JobEnd,
    JobLog,
    JobResult,
    NoDeadLetter,
    Outcome,
    Taker,
    WorkQueue,
    WorkQueueConfig,
    queue_config,
)

from .conftest import Bus, eventually

pytestmark = pytest.mark.anyio

STEADY = WorkQueueConfig(retry_delay=0.0, in_memory=True)
QUICK = STEADY._replace(ack_wait=3.0)
"""For takers that freeze: others keep their jobs, also where the machine stands still for 2 s."""


async def presence(bus: Bus) -> Presence:
    """One process on the bus under test."""
    return await Presence.over(BusConfig(), await bus.connect(), await bus.connect())


@pytest.fixture
async def here(bus: Bus) -> AsyncIterator[Presence]:
    one = await presence(bus)
    await one.data.background.open()
    yield one
    await one.close()


@pytest.fixture
async def name(here: Presence) -> AsyncIterator[EndpointName]:
    """A queue that no other test uses, in a namespace of its own."""
    name = EndpointName.of(f"n{secrets.token_hex(6)}", "Printer", "print")
    yield name
    await here.data.jetstream.delete_stream(work_stream(name))
    await here.data.jetstream.delete_stream(dead_letter_stream(name.namespace))


@pytest.fixture
def queue(here: Presence, name: EndpointName) -> WorkQueue:
    return WorkQueue(here, name, STEADY)


async def next_job(taker: Taker) -> Job:
    with anyio.fail_after(60.0):
        return await anext(taker)


async def jobs_left(queue: WorkQueue) -> int:
    return (await queue.depth(max_age=0.0)).jobs


async def comes_to_hold(queue: WorkQueue, waiting: int, held: int) -> None:
    """Wait until the server says so: it confirms a job a moment before it counts it."""
    async with asyncio.timeout(PATIENCE):
        while await queue.depth(max_age=0.0) != (waiting, held):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)


async def test_a_job_that_is_acknowledged_is_done_once(queue: WorkQueue) -> None:
    await queue.put(b"page", job_id="one", headers={"colour": "red"})

    async with queue.take() as taker:
        job = await next_job(taker)
        assert (job.job_id, job.data, job.headers) == ("one", b"page", {"colour": "red"})
        assert (job.tries, job.deadline) == (1, None)
        assert await queue.depth(max_age=0.0) == (0, 1)
        await job.ack()

    assert await queue.depth(max_age=0.0) == (0, 0)
    assert queue.ended == {JobEnd.DONE: 1}


async def test_a_job_is_put_once_under_its_id(queue: WorkQueue) -> None:
    await queue.put(b"1", job_id="one")
    await queue.put(b"1", job_id="one")
    await queue.put(b"2", job_id="two")

    assert await queue.depth(max_age=0.0) == (2, 0)


async def test_takers_wait_for_jobs_and_share_them(queue: WorkQueue) -> None:
    done: list[tuple[int, str]] = []
    held: set[int] = set()

    async def work(number: int) -> None:
        async with queue.take() as taker:
            async for job in taker:
                async with job:
                    held.add(number)
                    await eventually(lambda: held == {0, 1, 2})
                    done.append((number, job.job_id))

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(work, number)
        for number in range(12):
            await queue.put(b"", job_id=f"job-{number}")
        await eventually(lambda: queue.ended[JobEnd.DONE] == 12)
        tasks.cancel_scope.cancel()

    assert sorted(job_id for _, job_id in done) == sorted(f"job-{n}" for n in range(12))
    assert {number for number, _ in done} == {0, 1, 2}


async def test_a_taker_holds_no_more_than_its_limit(queue: WorkQueue) -> None:
    for number in range(3):
        await queue.put(b"", job_id=f"job-{number}")

    async with queue.take(limit=2) as taker:
        first = await next_job(taker)
        await next_job(taker)
        with anyio.move_on_after(0.3) as waiting:
            await anext(taker)
        assert waiting.cancelled_caught
        assert await queue.depth(max_age=0.0) == (1, 2)
        await first.ack()
        third = await next_job(taker)

    assert third.job_id == "job-2"
    # Leaving gave back the two that were not settled.
    assert queue.ended == {JobEnd.DONE: 1, JobEnd.RETURNED: 2}
    assert await jobs_left(queue) == 2


async def test_a_job_that_has_left_its_place_has_the_next_begin_before_it_is_settled(
    queue: WorkQueue,
) -> None:
    for number in range(3):
        await queue.put(b"", job_id=f"job-{number}")

    async with queue.take(limit=1) as taker:
        (first,) = await taker.begin()
        first.leave_place()
        (second,) = await taker.begin()
        second.leave_place()
        # As many as it may hold have left their places, and no more.
        with anyio.move_on_after(0.3) as waiting:
            await taker.begin()
        assert waiting.cancelled_caught
        assert await queue.depth(max_age=0.0) == (1, 2)
        await first.ack()
        (third,) = await taker.begin()
        await second.ack()
        await third.ack()
        assert taker.held == 0

    assert [job.job_id for job in (first, second, third)] == ["job-0", "job-1", "job-2"]
    assert await jobs_left(queue) == 0


async def test_all_jobs_for_which_there_are_places_begin_at_once(queue: WorkQueue) -> None:
    begun: list[str] = []
    for number in range(5):
        await queue.put(b"", job_id=f"job-{number}")

    async with queue.take(limit=3) as taker:
        while len(begun) < 3:
            begun.extend(job.job_id for job in await taker.begin())
        assert await queue.depth(max_age=0.0) == (2, 3)

    assert begun == ["job-0", "job-1", "job-2"]


async def test_a_held_job_is_kept_alive_and_one_of_a_frozen_taker_goes_to_another(
    here: Presence, name: EndpointName, bus: Bus
) -> None:
    queue = WorkQueue(here, name, QUICK)
    frozen = await presence(bus)
    await frozen.data.background.open()
    await queue.put(b"", job_id="one")

    async with queue.take() as taker, WorkQueue(frozen, name, QUICK).take() as other:
        job = await next_job(other)
        with anyio.move_on_after(1.5 * QUICK.ack_wait) as waiting:
            await anext(taker)
        assert waiting.cancelled_caught, "it was kept alive for 1.5 ack_waits"
        assert not job.is_doubtful

        await frozen.data.close()
        again = await next_job(taker)

        assert (again.job_id, again.tries) == ("one", 2)
        await again.ack()
    await frozen.close()
    assert await jobs_left(queue) == 0


async def vanish(process: Presence) -> None:
    """What the bus sees of a process that is killed: both connections are gone."""
    await process.lane.run(process.lane.connection.close())
    await process.data.close()


async def test_the_jobs_of_a_process_that_is_gone_begin_once_elsewhere_at_once(
    here: Presence, name: EndpointName, bus: Bus
) -> None:
    queue = WorkQueue(here, name, STEADY)
    killed = await presence(bus)
    await killed.data.background.open()
    for number in range(6):
        await queue.put(b"", job_id=f"job-{number}")
    begun: list[tuple[str, int]] = []

    async def take() -> None:
        async with queue.take() as taker, task_group() as tasks:
            async for job in taker:
                begun.append((job.job_id, job.tries))
                tasks.start_soon(hold, job)

    async def hold(job: Job) -> None:
        await all_begun.wait()
        await job.ack()

    all_begun = anyio.Event()
    async with task_group() as tasks:
        async with WorkQueue(killed, name, STEADY).take(limit=3) as other:
            for _ in range(3):
                await next_job(other)
            await next_told(here, name)
            for _ in range(6):
                tasks.start_soon(take)
            await eventually(lambda: len(begun) == 3)
            went_at = monotonic()
            await vanish(killed)

            await eventually(lambda: len(begun) == 6)

            assert monotonic() - went_at < STEADY.ack_wait / 3
            all_begun.set()
            await eventually(lambda: queue.ended[JobEnd.DONE] == 6)
        tasks.cancel_scope.cancel()
    await killed.close()

    assert sorted(begun) == [(f"job-{n}", 2 if n < 3 else 1) for n in range(6)]
    assert await jobs_left(queue) == 0


async def next_told(here: Presence, name: EndpointName) -> None:
    """Wait until a taker has stored that it holds three jobs."""
    with anyio.fail_after(30.0):
        while True:
            subject = holder_subject(name, "*")
            found = await here.data.jetstream.read("KV_dynbus_jobs", subject)
            if any(one.data.count(b"$JS.ACK") == 3 for one in found):
                return
            await anyio.sleep(0.02)


async def test_a_taker_that_begins_later_takes_the_jobs_of_those_that_are_gone(
    here: Presence, name: EndpointName, bus: Bus
) -> None:
    queue = WorkQueue(here, name, STEADY)
    killed = await presence(bus)
    await killed.data.background.open()
    for number in range(3):
        await queue.put(b"", job_id=f"job-{number}")
    async with WorkQueue(killed, name, STEADY).take(limit=3) as other:
        for _ in range(3):
            await next_job(other)
        await next_told(here, name)
        await vanish(killed)
        went_at = monotonic()

        async with queue.take(limit=3) as taker:
            jobs = [await next_job(taker) for _ in range(3)]
            assert monotonic() - went_at < STEADY.ack_wait / 3
            for job in jobs:
                await job.ack()
    await killed.close()

    assert [job.tries for job in jobs] == [2, 2, 2]


async def test_a_queue_that_is_paused_hands_out_nothing_to_takers_of_now_and_later(
    queue: WorkQueue, here: Presence, name: EndpointName
) -> None:
    await queue.put(b"", job_id="one")
    async with queue.take(limit=2) as taker:
        held = await next_job(taker)
        await queue.pause()
        await queue.put(b"", job_id="two")
        await held.nak(delay=0.0)
        async with queue.take(limit=2) as later:
            for one in (taker, later):
                with anyio.move_on_after(0.3) as waiting:
                    await anext(one)
                assert waiting.cancelled_caught
            await later.drain()
        assert (await queue.depth(max_age=0.0)).jobs == 2

        await queue.resume()

        jobs = [await next_job(taker) for _ in range(2)]
        for job in jobs:
            await job.ack()
    assert {job.job_id: job.tries for job in jobs} == {"one": 2, "two": 1}


async def test_a_taker_that_another_takes_for_dead_doubts_its_jobs(
    queue: WorkQueue, here: Presence, name: EndpointName
) -> None:
    for number in range(3):
        await queue.put(b"", job_id=f"job-{number}")
    async with queue.take(limit=3) as taker:
        jobs = [await next_job(taker) for _ in range(3)]
        await next_told(here, name)
        (record,) = await here.data.jetstream.read("KV_dynbus_jobs", holder_subject(name, "*"))
        assert not any(job.is_doubtful for job in jobs)

        await here.data.jetstream.publish(
            record.subject, b"another", headers={"KV-Operation": "DEL"}
        )
        await jobs[0].ack()

        await eventually(lambda: all(job.is_doubtful for job in jobs[1:]))


async def test_a_job_that_fails_is_tried_five_times_and_then_a_dead_letter(
    queue: WorkQueue, here: Presence, name: EndpointName
) -> None:
    await queue.put(b"page", job_id="one", headers={"colour": "red"})
    tries: list[int] = []

    async with queue.take() as taker:
        for number in range(1, 6):
            job = await next_job(taker)
            tries.append(job.tries)
            with pytest.raises(RuntimeError):
                async with job:
                    raise RuntimeError(f"no paper ({number})")

    assert tries == [1, 2, 3, 4, 5]
    assert await jobs_left(queue) == 0
    letters = DeadLetters(here.data.jetstream, name.namespace)
    (letter,) = await letters.find()
    assert letter.queue == name
    assert (letter.job_id, letter.data, letter.headers) == ("one", b"page", {"colour": "red"})
    assert (letter.reason, letter.tries) == ("tries", 5)
    assert letter.error == "RuntimeError: no paper (5)"
    assert letter.queued_at <= letter.died_at
    assert queue.ended == {JobEnd.RETRIED: 4, JobEnd.DEAD: 1}


async def test_a_job_whose_takers_all_went_silent_is_a_dead_letter_too(
    here: Presence, name: EndpointName, bus: Bus
) -> None:
    config = QUICK._replace(tries=1)
    queue = WorkQueue(here, name, config)
    frozen = await presence(bus)
    await frozen.data.background.open()
    await queue.put(b"", job_id="one")
    async with WorkQueue(frozen, name, config).take() as other:
        await next_job(other)
        await frozen.data.close()

        async with queue.take() as taker:
            with anyio.move_on_after(60.0) as waiting:
                async with task_group() as tasks:
                    tasks.start_soon(anext, taker)
                    await eventually(lambda: queue.ended[JobEnd.DEAD] == 1, 30.0)
                    tasks.cancel_scope.cancel()
    await frozen.close()

    assert not waiting.cancelled_caught
    (letter,) = await DeadLetters(here.data.jetstream, name.namespace).find()
    assert letter.error == "its taker gave no sign on try 1 of 1"
    assert await jobs_left(queue) == 0


async def test_a_job_that_ended_in_its_last_try_of_which_no_word_came_is_no_dead_letter(
    here: Presence, name: EndpointName, bus: Bus
) -> None:
    config = QUICK._replace(tries=1)
    queue = WorkQueue(here, name, config)
    gone = await presence(bus)
    await gone.data.background.open()
    await queue.put(b"", job_id="one")
    async with WorkQueue(gone, name, config).take() as other:
        await next_job(other)
        await gone.data.close()

        async def has_ended(job_id: str) -> bool:
            return job_id == "one"

        async with queue.take() as taker:
            taker.has_ended = has_ended
            with anyio.fail_after(30.0):
                job = await anext(taker)
            await job.ack()
    await gone.close()

    assert (job.job_id, job.tries) == ("one", 2)
    assert await DeadLetters(here.data.jetstream, name.namespace).find() == []
    assert await jobs_left(queue) == 0


async def test_a_job_that_is_given_back_by_those_who_leave_never_dies_of_it(
    here: Presence, name: EndpointName
) -> None:
    queue = WorkQueue(here, name, STEADY._replace(tries=2))
    await queue.put(b"page", job_id="one")

    for _ in range(5):
        async with queue.take() as taker:
            await next_job(taker)
    async with queue.take() as taker:
        job = await next_job(taker)
        assert (job.job_id, job.data) == ("one", b"page")
        await job.ack()

    assert queue.ended == {JobEnd.RETURNED: 5, JobEnd.DONE: 1}
    assert await jobs_left(queue) == 0


@pytest.mark.parametrize("tries", [1, 2])
async def test_a_job_that_is_given_back_for_a_while_waits_on_its_last_delivery_too(
    here: Presence, name: EndpointName, tries: int
) -> None:
    queue = WorkQueue(here, name, STEADY._replace(tries=tries))
    await queue.put(b"page", job_id="one", headers={"colour": "red"})

    async with queue.take() as taker:
        job = await next_job(taker)
        told = [job.tries]
        for _ in range(2 * tries):
            given_back = monotonic()
            await job.give_back(delay=0.3)
            job = await next_job(taker)
            assert monotonic() - given_back >= 0.29
            told.append(job.tries)
        assert (job.job_id, job.data, job.headers) == ("one", b"page", {"colour": "red"})
        await job.ack()

    assert told == [*[*range(1, tries + 1)] * 2, 1]
    assert queue.ended == {JobEnd.RETURNED: 2 * tries, JobEnd.DONE: 1}
    assert await jobs_left(queue) == 0


async def test_a_job_that_is_refused_is_a_dead_letter_and_can_be_tried_again(
    queue: WorkQueue, here: Presence, name: EndpointName
) -> None:
    letters = DeadLetters(here.data.jetstream, name.namespace)
    assert await letters.find() == []
    for job_id in ("one", "two"):
        await queue.put(b"page", job_id=job_id, deadline=monotonic() + 60, headers={"a": "b"})

    async with queue.take() as taker:
        for _ in range(2):
            await (await next_job(taker)).bury("the page is not there")
        one, two = await letters.find("Printer", "print")
        assert (one.reason, one.error, one.tries) == ("refused", "the page is not there", 1)
        assert await letters.find("Printer", "other") == []
        assert await letters.get(one.letter_id) == one

        await letters.redrive(one)
        await letters.redrive(one)
        await letters.discard(two)
        job = await next_job(taker)
        await job.ack()

    assert (job.job_id, job.data, job.headers, job.tries) == ("one", b"page", {"a": "b"}, 1)
    assert job.deadline is None
    assert await letters.find() == []
    assert await jobs_left(queue) == 0
    with pytest.raises(NoDeadLetter, match="is no dead letter"):
        await letters.get(one.letter_id)


async def test_a_job_that_is_done_since_it_was_redriven_keeps_its_result(
    queue: WorkQueue, here: Presence, name: EndpointName
) -> None:
    letters = DeadLetters(here.data.jetstream, name.namespace)
    log = JobLog(here.data.jetstream, name)
    await log.ensure()
    await queue.put(b"page", job_id="one")
    async with queue.take() as taker:
        await (await next_job(taker)).bury("the page is not there")
        [letter] = await letters.find()
        await log.end("one", JobResult(Outcome.FAILED, b""), 120.0)
        await letters.redrive(letter)
        await (await next_job(taker)).ack()
    await log.end("one", JobResult(Outcome.DONE, b"printed"), 120.0)

    # Whoever had no answer does it again.
    await letters.redrive(letter)

    result = await log.result("one")
    await here.data.jetstream.delete_stream(log.stream)
    assert result is not None
    assert (result.outcome, result.data) == (Outcome.DONE, b"printed")
    assert await jobs_left(queue) == 0


async def test_a_letter_of_a_job_that_was_too_large_to_keep_is_not_tried_again_empty(
    queue: WorkQueue, here: Presence, name: EndpointName
) -> None:
    js = here.data.jetstream
    await queue.depth()
    size = js.max_payload - 100
    await js.publish(work_subject(name, "large"), bytes(size))
    async with queue.take() as taker:
        await (await next_job(taker)).bury("no paper")
    letters = DeadLetters(js, name.namespace)

    [letter] = await letters.find()

    assert (letter.data, letter.lost_bytes) == (b"", size)
    assert letter.error == f"(its {size} bytes were too many to keep) no paper"
    with pytest.raises(PayloadTooLarge, match="put the job again from where it came"):
        await letters.redrive(letter)
    assert [one.letter_id for one in await letters.find()] == [letter.letter_id]
    assert (await queue.depth(max_age=0.0)).jobs == 0
    await letters.discard(letter)
    assert await letters.find() == []


async def test_a_job_that_dies_again_before_its_letter_is_dropped_has_a_letter_still(
    queue: WorkQueue, here: Presence, name: EndpointName
) -> None:
    letters = DeadLetters(here.data.jetstream, name.namespace)
    await queue.put(b"page", job_id="one")
    async with queue.take() as taker:
        await (await next_job(taker)).bury("the page is not there")
        [first] = await letters.find()
        await letters.redrive(first)
        await (await next_job(taker)).bury("it is not there either")

    # Whoever was slow to drop the letter that was tried again drops none that came since.
    await letters.discard(first)

    [second] = await letters.find()
    assert second.error == "it is not there either"


async def test_a_job_that_an_operator_cancelled_is_never_begun(
    bus: Bus, here: Presence, queue: WorkQueue
) -> None:
    operator = await bus.connect()
    for job_id in ("first", "by-its-id", "by-its-request", "last"):
        request = "r1" if job_id == "by-its-request" else "another"
        await queue.put(b"", job_id=job_id, headers={"Dynbus-Request-Id": request})

    async with queue.take() as taker:
        async with await next_job(taker) as first:
            # Who takes none yet hears nothing: what is remembered is remembered by takers.
            await here.lane.run(here.lane.connection.barrier())
            for said in (b"by-its-id", b'{"request_id": "r1"}'):
                operator.publish(cancel_subject(queue.name.namespace), said)
            heard = here.cancels.hear(queue.name.namespace)
            await eventually(lambda: len(heard) == 2)
        async with await next_job(taker) as last:
            pass

    assert (first.job_id, last.job_id) == ("first", "last")
    assert queue.ended == {JobEnd.DONE: 2, JobEnd.CANCELLED: 2}
    assert await jobs_left(queue) == 0


async def test_a_job_past_its_deadline_is_dropped_and_not_begun(
    queue: WorkQueue, here: Presence, name: EndpointName
) -> None:
    await queue.depth()
    over = {"Dynbus-Job": "late", "Dynbus-Deadline": "0"}
    await here.data.jetstream.publish(work_subject(name, "over"), b"", headers=over)
    await queue.put(b"", job_id="in-time", deadline=monotonic() + 3600)

    async with queue.take() as taker:
        job = await next_job(taker)
        assert job.deadline is not None
        assert 3500 < job.deadline - monotonic() <= 3600.5
        await job.ack()

    assert job.job_id == "in-time"
    assert queue.ended == {JobEnd.EXPIRED: 1, JobEnd.DONE: 1}
    assert await jobs_left(queue) == 0
    with pytest.raises(DeadlineExceeded, match="its deadline has passed"):
        await queue.put(b"", job_id="too-late", deadline=monotonic() - 1)


async def test_a_job_that_nobody_takes_stays_however_long_that_is(
    queue: WorkQueue, here: Presence, name: EndpointName
) -> None:
    await queue.put(b"page", job_id="one")

    stored = await here.data.jetstream.stream_config(work_stream(name))

    assert stored.limits.max_age is None


async def test_a_job_that_is_older_than_max_age_is_a_dead_letter_and_not_begun(
    here: Presence, name: EndpointName
) -> None:
    queue = WorkQueue(here, name, STEADY._replace(max_age=1.0))
    await queue.put(b"page", job_id="old", headers={"colour": "red"})
    await anyio.sleep(1.2)
    await queue.put(b"", job_id="new")

    async with queue.take() as taker, await next_job(taker) as job:
        assert job.job_id == "new"
        # What is begun in time has its time.
        await anyio.sleep(1.2)

    (letter,) = await DeadLetters(here.data.jetstream, name.namespace).find()
    assert (letter.job_id, letter.data, letter.headers) == ("old", b"page", {"colour": "red"})
    assert (letter.reason, letter.error) == ("age", "it was not begun within the 1 s of max_age")
    assert queue.ended == {JobEnd.DONE: 1, JobEnd.DEAD: 1}
    assert await jobs_left(queue) == 0


async def test_a_queue_that_was_made_with_a_limit_of_age_is_told_of(
    queue: WorkQueue, here: Presence, name: EndpointName, caplog: pytest.LogCaptureFixture
) -> None:
    limits = StreamLimits(max_age=3600.0, discard_new=True)
    await here.data.jetstream.ensure_stream(queue_config(name, STEADY)._replace(limits=limits))

    async with queue.take():
        pass

    assert "drops jobs that are older than 3600 s" in caplog.text
    assert f"nats stream edit {work_stream(name)} --max-age 0" in caplog.text


async def test_a_copy_of_a_job_is_as_old_as_the_job_and_has_no_more_time(
    here: Presence, name: EndpointName
) -> None:
    queue = WorkQueue(here, name, STEADY._replace(tries=1))
    put_at = monotonic()
    await queue.put(b"", job_id="one", deadline=put_at + 600)

    async with queue.take() as taker:
        first = await next_job(taker)
        await anyio.sleep(1.0)
        await first.give_back(delay=0.5)
        copy = await next_job(taker)
        await copy.bury("enough")

    assert copy.deadline == pytest.approx(put_at + 600, abs=0.4)
    assert copy.queued_at == pytest.approx(first.queued_at, abs=0.4)
    (letter,) = await DeadLetters(here.data.jetstream, name.namespace).find()
    assert letter.queued_at == pytest.approx(first.queued_at, abs=0.4)


async def test_a_full_queue_refuses_jobs_and_takes_them_when_it_has_room(
    here: Presence, name: EndpointName
) -> None:
    queue = WorkQueue(here, name, STEADY._replace(max_jobs=2))
    await queue.put(b"", job_id="one")
    await queue.put(b"", job_id="two")

    with pytest.raises(Overloaded, match=r"the queue .*Printer.print is full") as refused:
        await queue.put(b"", job_id="three")
    # It is there: a repeat needs no room.
    await queue.put(b"", job_id="two")
    async with queue.take() as taker:
        await (await next_job(taker)).ack()
    await queue.put(b"", job_id="three")

    assert refused.value.retry_after > 0
    await comes_to_hold(queue, 2, 0)


async def test_a_taker_that_drains_takes_no_more_and_finishes_what_it_holds(
    queue: WorkQueue,
) -> None:
    async with queue.take(limit=2) as taker:
        await queue.put(b"", job_id="one")
        job = await next_job(taker)
        async with task_group() as tasks:
            tasks.start_soon(anext, taker, None)
            await eventually(lambda: taker.held == 1)
            await taker.drain()
        await queue.put(b"", job_id="two")

        assert [one async for one in taker] == []
        await job.ack()

    assert queue.ended == {JobEnd.DONE: 1}
    async with queue.take() as other:
        assert (await next_job(other)).job_id == "two"


@pytest.mark.parametrize("idle", [0, 2])
async def test_a_taker_that_is_cancelled_does_not_take_back_what_it_gives_back(
    queue: WorkQueue, idle: int
) -> None:
    for number in range(5):
        await queue.put(b"", job_id=f"job-{number}")
        began = anyio.Event()

        async def work(job: Job, began: anyio.Event = began) -> None:
            async with job:
                began.set()
                await anyio.sleep_forever()

        async def take(work: Callable[[Job], Coroutine[Any, Any, None]] = work) -> None:
            # It has room for more, so a request for another job is open all the time.
            async with queue.take(limit=1 + idle) as taker, anyio.create_task_group() as tasks:
                async for job in taker:
                    tasks.start_soon(work, job)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take)
            await began.wait()
            tasks.cancel_scope.cancel()
        async with queue.take() as other:
            job = await next_job(other)
            assert (job.job_id, job.tries) == (f"job-{number}", 2)
            assert (await queue.depth(max_age=0.0)).held == 1
            await job.ack()

    assert queue.ended == {JobEnd.RETURNED: 5, JobEnd.DONE: 5}


async def test_a_job_that_comes_back_while_it_is_given_back_is_begun_again(
    queue: WorkQueue,
) -> None:
    await queue.put(b"", job_id="one")

    async with queue.take(limit=2) as taker:
        job = await next_job(taker)
        for tries in range(2, 5):
            async with anyio.create_task_group() as tasks:
                # Whoever waits gets it while the server confirms that it has it back.
                tasks.start_soon(job.give_back)
                job = await next_job(taker)
            assert (job.job_id, job.tries) == ("one", tries)
        await job.ack()

    assert queue.ended == {JobEnd.RETURNED: 3, JobEnd.DONE: 1}
    assert await jobs_left(queue) == 0


async def test_a_job_that_is_being_settled_is_so_whoever_is_cancelled(queue: WorkQueue) -> None:
    await queue.put(b"", job_id="one")

    async with queue.take() as taker:
        job = await next_job(taker)
        acking = asyncio.ensure_future(job.ack())
        await asyncio.sleep(0)
        acking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acking
        await eventually(lambda: taker.held == 0)
        with pytest.raises(RuntimeError, match="job one was settled before"):
            await job.nak()

    assert queue.ended == {JobEnd.DONE: 1}
    assert await jobs_left(queue) == 0


async def test_a_job_whose_task_is_cancelled_goes_back_at_once(queue: WorkQueue) -> None:
    await queue.put(b"", job_id="one")

    async with queue.take() as taker:
        job = await next_job(taker)
        with anyio.CancelScope() as scope:
            async with job:
                scope.cancel()
                await asyncio.sleep(60)
        again = await next_job(taker)
        await again.ack()

    assert again.tries == 2
    assert queue.ended == {JobEnd.RETURNED: 1, JobEnd.DONE: 1}


async def test_a_job_is_not_taken_for_done_when_the_bus_closes_before_that_is_confirmed(
    queue: WorkQueue, name: EndpointName, bus: Bus
) -> None:
    other = await presence(bus)
    await other.data.background.open()
    await queue.put(b"", job_id="one")

    async with WorkQueue(other, name, STEADY).take() as taker:
        job = await next_job(taker)
        # Of a stream that is gone nobody confirms anything.
        await other.data.jetstream.delete_stream(work_stream(name))
        acking = asyncio.ensure_future(job.ack())
        await asyncio.sleep(0)
        await other.background.close()
        with pytest.raises(UnknownOutcome, match="the bus was closed before"):
            await acking
    await other.close()


async def test_plain_nats_clients_may_put_jobs_and_bad_ones_are_dead_letters(
    queue: WorkQueue, here: Presence, name: EndpointName
) -> None:
    js = here.data.jetstream
    await queue.depth()
    await js.publish(work_subject(name, "first"), b"plain")
    await js.publish(work_subject(name, "second"), b"known", message_id="mine")
    for number, headers in enumerate(({"Dynbus-Deadline": "soon"}, {"Dynbus-Job": "a b"})):
        await js.publish(work_subject(name, f"bad-{number}"), b"bad", headers=headers)

    async with queue.take() as taker:
        one, two = await next_job(taker), None
        await one.ack()
        two = await next_job(taker)
        await two.ack()
        with anyio.move_on_after(30.0):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anext, taker)
                await eventually(lambda: queue.ended[JobEnd.DEAD] == 2, 30.0)
                tasks.cancel_scope.cancel()

    assert (one.job_id, one.data, two.job_id) == ("first", b"plain", "mine")
    letters = await DeadLetters(js, name.namespace).find()
    assert sorted((letter.reason, letter.job_id) for letter in letters) == [
        ("malformed", "a b"),
        ("malformed", "bad-0"),
    ]


async def test_a_job_whose_headers_are_no_ascii_is_begun_and_settled_as_any_other(
    queue: WorkQueue, here: Presence, name: EndpointName
) -> None:
    await queue.depth()
    for field in ("Dynbus-Request-Id", "X-Name"):
        block = f"NATS/1.0\r\n{field}: Zo\u00eb\r\n\r\n".encode()
        here.data.publish(work_subject(name, field), b"plain", headers=block)

    async with queue.take() as taker:
        for _ in range(2):
            async with await next_job(taker) as job:
                await job.bury("no such person")

    letters = await DeadLetters(here.data.jetstream, name.namespace).find()
    assert sorted((letter.job_id, *letter.headers.items()) for letter in letters) == [
        ("Dynbus-Request-Id", ("Dynbus-Request-Id", "Zo%C3%AB")),
        ("X-Name", ("X-Name", "Zo%C3%AB")),
    ]


async def test_takers_go_on_when_somebody_deletes_the_queue(
    queue: WorkQueue, here: Presence, name: EndpointName
) -> None:
    async with queue.take(limit=2) as taker:
        await queue.put(b"", job_id="lost")
        lost = await next_job(taker)
        waiting = asyncio.ensure_future(anext(taker))
        await asyncio.sleep(0.05)
        await here.data.jetstream.delete_stream(work_stream(name))

        await queue.put(b"", job_id="after", timeout=30.0)
        async with asyncio.timeout(60.0):
            job = await waiting
        await job.ack()
        await lost.ack()

    assert job.job_id == "after"
    assert await jobs_left(queue) == 0


async def test_what_cannot_be_a_job_is_refused_before_it_is_sent(
    queue: WorkQueue, here: Presence, name: EndpointName
) -> None:
    for job_id in ("", "a b", "ü", "x" * 129, "a\r\nb"):
        with pytest.raises(ConfigError, match="job id"):
            await queue.put(b"", job_id=job_id)
    for header in ("Nats-Msg-Id", "dynbus-job", "Dynbus-Dead-Error"):
        with pytest.raises(ConfigError, match="the queue has its own"):
            await queue.put(b"", job_id="one", headers={header: "x"})
    with pytest.raises(PayloadTooLarge, match="does not fit into the queue"):
        await queue.put(bytes(here.data.max_payload), job_id="one")
    with pytest.raises(ConfigError, match="limit = 0"):
        async with queue.take(limit=0):
            pass
    for change in (
        {"ack_wait": 0.0},
        {"tries": 0},
        {"retry_delay": -1.0},
        {"max_jobs": 0},
        {"max_age": float("nan")},
    ):
        with pytest.raises(ConfigError, match="is not usable"):
            WorkQueue(here, name, STEADY._replace(**change))


async def test_the_depth_is_asked_for_once_by_many(queue: WorkQueue) -> None:
    assert await queue.depth() == (0, 0)
    await queue.put(b"", job_id="one")

    depths = await asyncio.gather(*(queue.depth(max_age=3600.0) for _ in range(100)))

    assert set(depths) == {(1, 0)}
