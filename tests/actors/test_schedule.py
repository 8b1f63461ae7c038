"""Schedules: when handlers are due, what is refused, and one firing for all instances."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus import Actor, ConfigError, context, cron, every, handler
from dynbus.actors.declaring.schedule import Cron, Every, Missed, due_times, firing_name
from dynbus.bus.clock import unix_time
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.work_queue import JobLog
from dynbus.testing import TestKit, run

BERLIN = ZoneInfo("Europe/Berlin")


def unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# When it is due ---------------------------------------------------------------------------


@given(st.floats(1, 1e6), st.floats(0, 4e9))
def test_every_period_comes_after_the_moment_and_within_one(period: float, now: float) -> None:
    due = Every(period, "skip").after(now)

    assert now < due <= now + 2 * period


def test_each_hour_is_a_full_hour_in_utc() -> None:
    schedule = Every(3600.0, "skip")

    assert schedule.after(unix("2026-11-24T07:00:00Z")) == unix("2026-11-24T08:00:00Z")
    assert schedule.after(unix("2026-11-24T07:59:59Z")) == unix("2026-11-24T08:00:00Z")


def days_of(schedule: Cron, first: str, count: int) -> list[str]:
    found, now = list[str](), unix(first)
    for _ in range(count):
        now = schedule.after(now)
        found.append(datetime.fromtimestamp(now, UTC).isoformat()[:16])
    return found


def test_a_cron_line_is_of_its_time_zone_in_summer_and_winter() -> None:
    morning = Cron("0 7 * * *", BERLIN, "skip")

    assert days_of(morning, "2026-10-24T00:00:00Z", 3) == [
        "2026-10-24T05:00",
        "2026-10-25T06:00",
        "2026-10-26T06:00",
    ]


def test_a_time_that_comes_twice_or_never_runs_once() -> None:
    at_night = Cron("30 2 * * *", BERLIN, "skip")

    # Clocks went forward from 2 to 3 on 2026-03-29, and back from 3 to 2 on 2026-10-25.
    assert days_of(at_night, "2026-03-28T12:00:00Z", 2) == ["2026-03-29T01:00", "2026-03-30T00:30"]
    assert days_of(at_night, "2026-10-24T12:00:00Z", 2) == ["2026-10-25T00:30", "2026-10-26T01:30"]


NOON = unix("2026-11-24T12:00:30Z")


@pytest.mark.parametrize(
    ("missed", "last", "due"),
    [
        ("skip", NOON - 10, []),
        ("skip", NOON - 40, [NOON - 30]),
        ("skip", NOON - 7300, [NOON - 30]),
        ("catch_up", NOON - 7300, [NOON - 7230, NOON - 3630, NOON - 30]),
        # A server whose clock was set back.
        ("catch_up", NOON + 9000, []),
    ],
)
def test_what_was_missed_is_left_out_or_made_up(
    missed: Missed, last: float, due: list[float]
) -> None:
    assert list(due_times(Every(3600.0, missed), last, NOON)) == due


@given(st.lists(st.floats(0, 1e4), min_size=1), st.floats(1, 500))
def test_nothing_is_due_twice_or_missed_however_the_clock_jumps(
    jumps: list[float], period: float
) -> None:
    schedule, last, fired = Every(period, "catch_up"), 0.0, list[float]()
    for now in jumps:
        for due in due_times(schedule, last, now):
            fired.append(due)
            last = due

    assert fired == sorted(set(fired))
    assert len(fired) == sum(1 for _ in due_times(schedule, 0.0, max(jumps)))


def test_a_firing_has_the_same_name_everywhere() -> None:
    assert firing_name(unix("2026-11-24T07:00:00+01:00")) == "20261124T060000Z"
    assert firing_name(0.5) == "19700101T000000_500000Z"


# What is refused --------------------------------------------------------------------------


# Type checkers refuse most of it already.
untyped_every: Any = every
untyped_cron: Any = cron
untyped_handler: Any = handler


async def tick(actor: Reports) -> None: ...


async def tick_of(actor: Reports, name: str) -> None: ...


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: untyped_every("soon"), "must be 0 or more seconds, or text with a unit"),
        (lambda: untyped_every(0.1), "give a period of 1 s or more"),
        (lambda: untyped_every("1h", missed="later"), 'must be "skip" or "catch_up"'),
        (lambda: untyped_cron("7 o'clock"), "is no cron line"),
        (lambda: untyped_cron("0 25 * * *"), r"is no cron line \(Bad hour\)"),
        (lambda: untyped_cron("0 0 30 2 *"), r"is no cron line \(Bad day"),
        (
            lambda: untyped_cron("0 7 * * *", tz="Berlin"),
            "is no time zone: give a name such as 'Europe/B",
        ),
        (lambda: untyped_every("1h")(handler(tick)), "each firing is a job: write @handler"),
        (lambda: untyped_every("1h")(tick_of), "nobody is there to send that"),
    ],
)
def test_schedules_that_cannot_be_are_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_a_handler_that_is_declared_anew_without_being_durable_is_refused_at_its_start() -> None:
    async def tick(self: Any) -> None: ...

    class Late(Actor, namespace="demo"):
        declared = untyped_handler(untyped_every("1h")(tick))

    async def story() -> None:
        async with TestKit() as kit:
            with pytest.raises(ConfigError, match="each firing is a job"):
                await kit.start(Late)

    run(story())


# One firing for all -----------------------------------------------------------------------


class Reports(Actor, namespace="demo"):
    fired: list[tuple[str, datetime]]

    @every("1m", missed="catch_up")
    async def report(self, due: datetime) -> None:
        self.fired.append((context().idempotency_key, due))

    @cron("*/2 * * * *", tz="Europe/Berlin")
    async def glance(self) -> int:
        self.fired.append((f"glance {context().idempotency_key}", datetime.now(UTC)))
        return len(self.fired)


def test_instances_fire_once_between_them_and_make_up_what_they_missed() -> None:
    Reports.fired = []

    async def story() -> float:
        async with TestKit() as kit:
            began = unix_time()
            first = await kit.start(Reports)
            await kit.start(Reports)
            await anyio.sleep(180)
            log = JobLog(kit.caller.bus.data.jetstream, EndpointName("demo", "Reports", "report"))
            # Of all firings only the last is kept.
            kept = await log.jetstream.read(log.stream, "*.*._jobs.*.*.last")
            assert [one.sequence for one in kept] == [(await log.last_firing())[1]]
            await kit.kill(first)
            await anyio.sleep(190)
            for instance in list(kit.started.values())[1:]:
                await instance.stop()
            await anyio.sleep(360)
            await kit.start(Reports)
            await anyio.sleep(120)
            return began

    began = run(story(), limit=20_000)

    reports = [due for key, due in Reports.fired if not key.startswith("glance")]
    first = datetime.fromtimestamp(Every(60.0, "skip").after(began), UTC)
    assert reports == [first + timedelta(minutes=at) for at in range(len(reports))]
    assert len(reports) == 14
    glances = [key for key, _ in Reports.fired if key.startswith("glance")]
    assert len(glances) == len(set(glances)) == 5


def test_a_schedule_that_cannot_be_submitted_goes_on_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Reports.fired = []

    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Reports)
            await anyio.sleep(70)
            before = len(Reports.fired)
            with kit.bus.drop("$JS.API.STREAM.MSG.GET.>"):
                await anyio.sleep(70)
            await anyio.sleep(30)
            assert len(Reports.fired) > before

    with caplog.at_level(logging.WARNING):
        run(story(), limit=20_000)

    assert "the schedule of demo.Reports.report waits" in caplog.text
    keys = [key for key, _ in Reports.fired]
    assert len(keys) == len(set(keys))
