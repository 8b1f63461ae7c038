"""`TestKit.pass_time`: a week of schedules, and what must not be leapt over."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import ClassVar

import anyio
import pytest

from dynbus import Actor, ConfigError, call_options, cron, every, handler, sleep_until
from dynbus.testing import TestKit, run

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)


class Reports(Actor, namespace="demo"):
    kit: ClassVar[TestKit]
    hourly: ClassVar[list[tuple[datetime, datetime]]]
    morning: ClassVar[list[datetime]]
    later: ClassVar[list[datetime]]

    @every("1h")
    async def count(self, due: datetime) -> None:
        self.hourly.append((due, self.kit.now()))

    @cron("0 7 * * *")
    async def report(self) -> None:
        self.morning.append(self.kit.now())

    @handler
    async def ping(self) -> str:
        return "there"

    @handler(durable=True)
    async def wait(self, until: datetime) -> None:
        await sleep_until(until)
        self.later.append(self.kit.now())


async def started(kit: TestKit) -> None:
    Reports.kit, Reports.hourly, Reports.morning, Reports.later = kit, [], [], []
    await kit.start(Reports)


def test_each_firing_of_a_week_runs_at_the_time_that_is_due() -> None:
    async def story() -> tuple[datetime, datetime]:
        async with TestKit() as kit:
            await started(kit)
            began = kit.now()
            await kit.pass_time("7d")
            return began, kit.now()

    began, ended = run(story())

    assert ended - began == timedelta(days=7)
    first = began.replace(minute=0, second=0, microsecond=0) + HOUR
    every_hour = [first + HOUR * at for at in range(7 * 24)]
    assert [due for due, _ in Reports.hourly] == every_hour
    assert all(timedelta(0) <= ran - due < timedelta(seconds=0.1) for due, ran in Reports.hourly)
    assert [one.hour for one in Reports.morning] == [7] * 7
    assert [one.minute for one in Reports.morning] == [0] * 7


def test_jobs_that_wait_for_a_time_begin_and_go_on_at_that_time() -> None:
    async def story() -> list[timedelta]:
        async with TestKit() as kit:
            await started(kit)
            client = kit.client(Reports)
            await kit.pass_time("1d")
            began = kit.now()
            await client.wait.submit(began + 3 * MINUTE, at=began + MINUTE)
            await client.wait.submit(began + 2 * MINUTE)
            await kit.pass_time("1h")
            return [one - began for one in Reports.later]

    second = timedelta(seconds=1)
    early, late = run(story())

    assert 2 * MINUTE <= early < 2 * MINUTE + second
    assert 3 * MINUTE <= late < 3 * MINUTE + second


def test_a_sleep_of_the_user_ends_at_its_time() -> None:
    async def story() -> list[timedelta]:
        woken: list[timedelta] = []

        async def watch() -> None:
            for _ in range(3):
                await anyio.sleep(100)
                woken.append(kit.now() - began)

        async with TestKit() as kit:
            await started(kit)
            began = kit.now()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                await kit.pass_time("10m")
            return woken

    assert [one.total_seconds() for one in run(story())] == pytest.approx([100, 200, 300])


def test_the_instances_of_before_are_known_to_one_that_comes_after() -> None:
    class Late(Actor, namespace="demo"):
        @handler
        async def ask(self) -> str:
            with call_options(wait=0.0):
                return await self.runtime.client(Reports).ping()

    async def story() -> str:
        async with TestKit() as kit:
            await started(kit)
            await kit.pass_time("1d")
            await kit.start(Late)
            return await kit.client(Late).ask()

    assert run(story()) == "there"


def test_time_that_cannot_pass_is_refused() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            with pytest.raises(ConfigError, match="pass_time"):
                await kit.pass_time("a week")

    async def real() -> None:
        async with TestKit() as kit:
            with pytest.raises(RuntimeError, match=r"testing\.run"):
                await kit.pass_time(1.0)

    run(story())
    asyncio.run(real())


def test_a_firing_at_the_end_of_the_time_is_had_with_a_second_more() -> None:
    async def story() -> timedelta:
        async with TestKit() as kit:
            await started(kit)
            to_full_hour = HOUR - timedelta(minutes=kit.now().minute, seconds=kit.now().second)
            await kit.pass_time(to_full_hour.total_seconds() + 1.0)
            return Reports.hourly[-1][0] - kit.now()

    assert timedelta(seconds=-1.5) <= run(story()) <= timedelta(seconds=-0.5)
    assert len(Reports.hourly) == 1
