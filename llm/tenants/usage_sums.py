"""The sums of what tenants have used, read from the bus."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from dynbus import Unavailable
from dynbus.spi import JetStream, NoStream

from .keys import tenant_token
from .recording import MAX_AGE, USAGE_STREAM, read_record
from .usage import HOUR, USAGE_BUCKET, UsageEntry, UsageRecord, hour_of

READ_TIMEOUT: Final = 30.0

GROUPS: Final = ("tenant", "model", "key", "instance", "hour", "day", "month")
"""The groups that sums can be for."""

_TIMES: Final = {"hour": "%Y-%m-%dT%H:00Z", "day": "%Y-%m-%d", "month": "%Y-%m"}


class HourOfUsage(NamedTuple):
    """A record, and the beginning of its hour."""

    at: datetime
    record: UsageRecord


class UsageSum(NamedTuple):
    """The sums of a group.

    Attributes:
        group: by name.
        requests: that engines were given.
        prompt: tokens of prompts, cached or not.
        cached: of those, the ones that a cache had.
        completion: tokens of answers.
    """

    group: dict[str, str]
    requests: int
    prompt: int
    cached: int
    completion: int

    @property
    def total(self) -> int:
        """All tokens."""
        return self.prompt + self.completion

    @property
    def saved(self) -> float:
        """The part of the tokens of prompts that nobody had to compute."""
        return self.cached / self.prompt if self.prompt else 0.0


def sum_up(hours: Iterable[HourOfUsage], by: Sequence[str]) -> list[UsageSum]:
    """The sums by groups, in the order of their names.

    Args:
        by: of `GROUPS`.
    """
    sums: dict[tuple[str, ...], UsageEntry] = {}
    for hour in hours:
        for entry in hour.record.entries:
            known = sums.setdefault(_group(hour, entry, by), UsageEntry("", "", ""))
            known.add(entry.requests, entry.tokens)
    return [
        UsageSum(dict(zip(by, group, strict=True)), known.requests, *known.tokens)
        for group, known in sorted(sums.items(), key=lambda one: one[0])
    ]


def _group(hour: HourOfUsage, entry: UsageEntry, by: Sequence[str]) -> tuple[str, ...]:
    def value(name: str) -> str:
        if name in _TIMES:
            return hour.at.strftime(_TIMES[name])
        return hour.record.tenant if name == "tenant" else str(getattr(entry, name))

    return tuple(map(value, by))


async def read_usage(
    jetstream: JetStream, since: float, until: float, *, tenant: str = ""
) -> list[HourOfUsage]:
    """The records of the hours of a time.

    Args:
        since, until: Unix seconds. An hour counts that has begun at `since` or later, or with it in
            it, and before `until`.
        tenant: empty for all.

    Raises:
        Unavailable: JetStream does not answer, or a record is none.
    """
    of = tenant_token(tenant) if tenant else "*"
    read: list[HourOfUsage] = []
    for day in _days(since, until):
        subject = f"$KV.{USAGE_BUCKET}.{day}.*.{of}.*.*"
        try:
            stored = await jetstream.read(USAGE_STREAM.name, subject, timeout=READ_TIMEOUT)
        except NoStream:
            return []
        for message in stored:
            try:
                hour = HourOfUsage(hour_of(message.subject), read_record(message.data))
            except ValueError as error:
                raise Unavailable(f"{message.subject} is no record of usage: {error}") from None
            if since - HOUR < hour.at.timestamp() < until:
                read.append(hour)
    return read


def _days(since: float, until: float) -> Iterator[str]:
    """The days of a time by UTC, as tokens of subjects; one that stands for all of them where the
    time has no beginning that anything is kept of."""
    if until - since > MAX_AGE or math.isinf(since):
        yield "*"
        return
    day = datetime.fromtimestamp(since, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    while day.timestamp() < until:
        yield day.strftime("%Y%m%d")
        day += timedelta(days=1)
