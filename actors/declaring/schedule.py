"""Schedules of handlers: `@every` and `@cron`, and the decision what is due. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, Protocol, TypeVar, get_args, overload
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.seconds import seconds_of

from .durable import (
    Durable,
    DurableWithoutRequest,
    TakesNothing,
    TakesRequest,
)
from .handlers import HandlerSpec, handler

T = TypeVar("T")
A = TypeVar("A")

SCHEDULE: Final = "__dynbus_schedule__"
LEAST_PERIOD: Final = 1.0
MISSED_AFTER: Final = 60.0
"""Seconds by which a firing is late that is not made up where `missed` is "skip"."""

Missed = Literal["skip", "catch_up"]


class Schedule(Protocol):
    """The times at which a handler is to run.

    Attributes:
        missed: what becomes of times at which no instance was there.
    """

    @property
    def missed(self) -> Missed: ...

    def after(self, unix: float) -> float:
        """The first time after one, in Unix seconds; infinity where there is none."""
        ...


@dataclass(frozen=True)
class Every:
    """Whole multiples of a period since 1970 in UTC, so that all instances have the same times.

    Attributes:
        period: seconds.
    """

    period: float
    missed: Missed

    def after(self, unix: float) -> float:
        due = (math.floor(unix / self.period) + 1) * self.period
        # Of a period that is no binary fraction, such as a third of a minute.
        return due if due > unix else due + self.period


@dataclass(frozen=True)
class Cron:
    """The times of a cron line in a time zone, as Debian's cron has them.

    Where clocks go forward, a time that does not exist runs at once after the change; where they go
    back, a time that exists twice runs once, and a line with wildcards for hours runs through.
    """

    line: str
    zone: ZoneInfo
    missed: Missed

    def after(self, unix: float) -> float:
        from cronsim import CronSim

        times = CronSim(self.line, datetime.fromtimestamp(math.floor(unix), self.zone))
        due = next(times, None)
        return math.inf if due is None else due.timestamp()


def due_times(schedule: Schedule, last: float, now: float) -> Iterator[float]:
    """The times that are due and were not seen to before, oldest first.

    Args:
        last: the last that was seen to, in Unix seconds.
        now: by the server's clock; earlier than `last` where that was set back.
    """
    if schedule.missed == "skip":
        last = max(last, now - MISSED_AFTER)
    due = schedule.after(last)
    while due <= now:
        yield due
        due = schedule.after(due)


def firing_name(due: float) -> str:
    """The name of the job of a firing: the same at every instance."""
    return f"{datetime.fromtimestamp(due, UTC):%Y%m%dT%H%M%S.%fZ}".replace(".000000", "").replace(
        ".", "_"
    )


class ScheduleDecorator(Protocol):
    """The decorators `every(...)` and `cron(...)`."""

    @overload
    def __call__(self, function: DurableWithoutRequest[T], /) -> DurableWithoutRequest[T]: ...
    @overload
    def __call__(self, function: Durable[datetime, T], /) -> Durable[datetime, T]: ...
    @overload
    def __call__(self, function: TakesNothing[A, T], /) -> DurableWithoutRequest[T]: ...
    @overload
    def __call__(self, function: TakesRequest[A, datetime, T], /) -> Durable[datetime, T]: ...


def every(period: float | str, *, missed: Missed = "skip") -> ScheduleDecorator:
    """Have a durable handler run at each multiple of a period, once for all instances.

    The times are those of the server's clock, counted from 1970 in UTC: `"1h"` is each full hour.
    Each firing is a job, with the tries, dead letters and steps that jobs have. A method without
    `@handler(durable=True, ...)` below this becomes a durable handler. It takes no request, or the
    time that is due, a `datetime` in UTC.

    Args:
        period: seconds from 1 on, or text such as `"10m"`, `"1h"` or `"1d"`.
        missed: what becomes of firings at whose time no instance was there: those that are late by
            more than 60 seconds are left out ("skip"), or all are made up ("catch_up").

    Raises:
        ConfigError: a value is not usable, or the method is no durable handler of that kind.
    """
    seconds = seconds_of(period, "every(period)")
    if seconds < LEAST_PERIOD:
        raise ConfigError(f"every({period!r}): give a period of {LEAST_PERIOD:g} s or more")
    return _scheduled(Every(seconds, _checked_missed("every", missed)), f"every({period!r})")


def cron(line: str, *, tz: str = "UTC", missed: Missed = "skip") -> ScheduleDecorator:
    """Have a durable handler run at the times of a cron line, once for all instances; see `every`.

    Args:
        line: minute, hour, day of the month, month, day of the week, such as `"0 7 * * 1-5"`; with
            six fields the first is the second.
        tz: the time zone of the line, such as `"Europe/Berlin"`.
        missed: see `every`.

    Raises:
        ConfigError: a value is not usable, or the method is no durable handler of that kind.
    """
    from cronsim import CronSim, CronSimError

    label = f"cron({line!r})"
    try:
        zone = ZoneInfo(tz)
    except (ZoneInfoNotFoundError, ValueError, TypeError):
        raise ConfigError(
            f"{label}: tz={tz!r} is no time zone: give a name such as 'Europe/Berlin'"
        ) from None
    try:
        CronSim(line, datetime.now(zone))
    except (CronSimError, AttributeError) as error:
        raise ConfigError(
            f"{label} is no cron line ({error}): write minute, hour, day of the month, month and "
            "day of the week, such as '0 7 * * 1-5'"
        ) from None
    return _scheduled(Cron(line, zone, _checked_missed("cron", missed)), label)


def _checked_missed(label: str, missed: Any) -> Missed:
    if missed not in get_args(Missed):
        raise ConfigError(f'{label}: missed={missed!r} must be "skip" or "catch_up"')
    choice: Missed = missed
    return choice


def _scheduled(schedule: Schedule, label: str) -> ScheduleDecorator:
    def decorate(method: Any) -> Any:
        declare: Callable[[Any], Any] = handler(durable=True)
        made: Any = method if HandlerSpec.of(method) is not None else declare(method)
        setattr(made, SCHEDULE, schedule)
        check_schedule(HandlerSpec.of(made), label)
        return made

    return decorate


def schedule_of(spec: HandlerSpec) -> Schedule | None:
    """The schedule of a handler that runs by itself; None for one that has none.

    Raises:
        ConfigError: it has one and cannot run so.
    """
    schedule: Schedule | None = getattr(spec.function, SCHEDULE, None)
    if schedule is not None:
        check_schedule(spec, f"{schedule}")
    return schedule


def check_schedule(spec: HandlerSpec | None, label: str) -> None:
    """Refuse a schedule of what cannot run by itself.

    Raises:
        ConfigError: the handler is not durable, or takes another request than the time.
    """
    assert spec is not None, "its decorator has made it a handler"
    if spec.durable is None:
        raise ConfigError(
            f"{spec.label} has the schedule {label}, and each firing is a job: write "
            "@handler(durable=True) below it, or leave out @handler"
        )
    annotation = None if spec.parameter is None else spec.parameter.annotation
    if annotation not in (None, datetime, "datetime", "datetime.datetime"):
        raise ConfigError(
            f"{spec.label} has the schedule {label} and takes {annotation}: nobody is there to "
            "send that; take no request, or a datetime, the time that is due"
        )
