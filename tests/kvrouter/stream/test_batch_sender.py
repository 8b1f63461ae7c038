"""Batches go out side by side, and what failed goes out again after a pause that grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import TaskGroup
from tests.kvrouter.event_bus import STREAM, event_subject, eventually, stored, stored_messages

from dynbus.bus.clock import monotonic
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.memory.jetstream import MemoryJetStream
from dynbus.kvrouter.stream.event_log import EventLog
from dynbus.kvrouter.stream.event_stream import EpochClock, EventStream, ensure_stream
from dynbus.kvrouter.stream.publisher import MAX_RETRY, BatchSender
from dynbus.testing import run


class Sending:
    """A sender, and logs of two ranks."""

    def __init__(
        self, bus: MemoryBus, sender: BatchSender, told: list[EventLog], tasks: TaskGroup
    ) -> None:
        self.tasks = tasks
        self.bus = bus
        self.sender = sender
        self.told = told
        epochs = EpochClock(lambda: 1000)
        self.logs = [EventLog(rank, epochs, max_batch_bytes=2048) for rank in (0, 1)]

    async def send(self) -> None:
        await self.sender.send(self.logs, monotonic(), self.tasks)

    @property
    def is_idle(self) -> bool:
        return all(log.is_idle for log in self.logs)


@asynccontextmanager
async def begun() -> AsyncGenerator[Sending]:
    bus = MemoryBus()
    connection = await bus.connect()
    await ensure_stream(connection.jetstream, EventStream("demo"))
    told: list[EventLog] = []
    sender = BatchSender(connection, EventStream("demo"), ("demo", "Engine", "a"), told.append)
    async with anyio.create_task_group() as tasks:
        yield Sending(bus, sender, told, tasks)
        tasks.cancel_scope.cancel()
    await connection.close()


async def stored_subjects(bus: MemoryBus) -> list[str]:
    """Of the messages in the stream, in their order."""
    return [message.subject for message in await stored_messages(bus)]


def test_every_rank_s_batches_are_stored_under_its_subject() -> None:
    async def story() -> tuple[list[str], int]:
        async with begun() as sending:
            sending.logs[1].append([stored(*range(1, 501))], 1.0)
            await sending.send()
            await eventually(lambda: sending.is_idle)
            return await stored_subjects(sending.bus), len(sending.told)

    subjects, told = run(story())

    assert subjects[:1] == [event_subject("a", 0)]
    assert set(subjects[1:]) == {event_subject("a", 1)}
    assert told == len(subjects) > 4


def test_what_comes_while_batches_are_sent_waits_for_more_to_share_its_message() -> None:
    async def story() -> list[int]:
        async with begun() as sending:
            log = sending.logs[0]

            async def talk() -> None:
                for number in range(3, 30):
                    log.append([stored(number)], 1.0)
                    await asyncio.sleep(0)

            await sending.send()
            await eventually(lambda: sending.is_idle)
            log.append([stored(1)], 1.0)
            sending.tasks.start_soon(talk)
            await sending.send()
            first = log.in_flight
            await eventually(lambda: not log.in_flight)
            await sending.send()
            await eventually(lambda: sending.is_idle)
            return [first, log.statistics.batches]

    assert run(story()) == [1, 3]


def test_a_failure_is_told_and_puts_everything_off_for_a_while() -> None:
    async def story() -> tuple[str, bool, float]:
        async with begun() as sending:
            sending.bus.jetstream.stall()
            await sending.send()
            await eventually(lambda: sending.sender.failures == 2)
            sending.bus.jetstream.stall(False)
            failure, put_off = sending.sender.last_failure, sending.sender.retry_at - monotonic()
            await sending.send()
            assert await stored_subjects(sending.bus) == []
            sending.sender.try_at_once()
            await sending.send()
            await eventually(lambda: sending.is_idle)
            return failure, sending.sender.last_failure == "", put_off

    failure, is_over, put_off = run(story())

    assert "did not answer" in failure
    assert is_over
    assert 0.0 < put_off <= 0.05


def test_pauses_grow_up_to_a_bound() -> None:
    async def story() -> list[float]:
        async with begun() as sending:
            pauses: list[float] = []
            for _ in range(10):
                sending.sender.note_failure(RuntimeError("again"))
                pauses.append(sending.sender.retry_at - monotonic())
                await asyncio.sleep(pauses[-1])
            return pauses

    pauses = run(story())

    assert pauses[0] <= 0.05
    assert MAX_RETRY / 2 <= pauses[-1] <= MAX_RETRY


def test_a_stream_that_is_missing_is_made_again() -> None:
    async def story() -> int:
        async with begun() as sending:
            sending.bus.jetstream.delete(STREAM)
            await sending.send()
            await eventually(lambda: sending.sender.failures == 2)
            sending.sender.try_at_once()
            await sending.send()
            await eventually(lambda: sending.is_idle)
            return len(await stored_subjects(sending.bus))

    assert run(story()) == 2


def test_what_is_in_flight_of_an_epoch_that_is_over_is_given_up() -> None:
    async def story() -> tuple[int, list[int]]:
        async with begun() as sending:
            with sending.bus.delay(">", 0.2):
                await sending.send()
                sending.logs[0].begin_anew()
                await sending.send()
                await eventually(lambda: sending.is_idle)
            return sending.sender.failures, [log.event_epoch for log in sending.logs]

    assert run(story()) == (0, [1002, 1001])


def test_a_failure_that_nobody_foresaw_is_logged_and_its_batch_goes_out_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*args: object, **options: object) -> int:
        raise ValueError("a mistake")

    async def story() -> int:
        async with begun() as sending:
            with monkeypatch.context() as patched:
                patched.setattr(MemoryJetStream, "publish", broken)
                await sending.send()
                await eventually(lambda: sending.sender.failures > 0)
            sending.sender.try_at_once()
            await sending.send()
            await eventually(lambda: sending.is_idle)
            return len(await stored_subjects(sending.bus))

    assert run(story()) == 2
    assert "a batch could not be published" in caplog.text
