"""`UsageBook`: what a front end has counted of its tenants' tokens, without I/O or clock.

A front end writes what it has counted itself: sums of an hour, which only grow, under subjects that
are its own. So a record that is written twice, or late, changes nothing, and what a tenant has used
is the sum over all records.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from dynbus.llm.answers import Usage

from .keys import tenant_token

USAGE_BUCKET: Final = "dynbus_usage"

HOUR: Final = 3600

MOST_ENTRIES: Final = 32
"""Entries of one record: it is written again whenever one of them has grown."""


class Tokens(NamedTuple):
    """Tokens of a request that were counted.

    Attributes:
        prompt: cached or not.
        cached: of those of prompts.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    @classmethod
    def of(cls, usage: Usage) -> Tokens:
        """Those that a request has used."""
        return cls(usage.prompt, usage.cached or 0, usage.completion)

    def more(self, other: Tokens) -> Tokens:
        """Those with others."""
        return Tokens(*map(operator.add, self, other))

    def less(self, other: Tokens) -> Tokens:
        """Those beyond others."""
        return Tokens(*map(operator.sub, self, other))

    def up_to(self, other: Tokens) -> Tokens:
        """The larger of each."""
        return Tokens(*map(max, self, other))


class UsageEntry(msgspec.Struct, omit_defaults=True):
    """The sums of an hour for one key, at one instance of a model.

    Attributes:
        key: the id of the key, as `dynbus keys ls` shows it.
        requests: that an engine was given.
        prompt: tokens of prompts, cached or not.
        cached: of those, the ones that a cache had.
        completion: tokens of answers.
    """

    model: str
    key: str
    instance: str
    requests: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0

    @property
    def tokens(self) -> Tokens:
        """All of them."""
        return Tokens(self.prompt, self.cached, self.completion)

    def add(self, requests: int, tokens: Tokens) -> None:
        """Count more."""
        self.requests += requests
        self.prompt += tokens.prompt
        self.cached += tokens.cached
        self.completion += tokens.completion


def by_model(entries: Iterable[UsageEntry]) -> list[UsageEntry]:
    """The sums of entries, one for each model."""
    sums: dict[str, UsageEntry] = {}
    for one in entries:
        sums.setdefault(one.model, UsageEntry(one.model, "", "")).add(one.requests, one.tokens)
    return [*sums.values()]


class UsageRecord(msgspec.Struct, omit_defaults=True):
    """A record on the bus, as JSON.

    Attributes:
        open: what is counted so far of each resumable stream that runs, by the key of its log.
    """

    tenant: str
    entries: list[UsageEntry] = []
    open: dict[str, Tokens] = {}


class Payer(NamedTuple):
    """The holder of a key, for whom a model works.

    Attributes:
        key: the id of the key.
    """

    tenant: str
    key: str
    model: str


class Page:
    """One record of an hour, and how much of it is stored.

    Attributes:
        version: grows with each change.
        stored: the version that is known to be stored.
    """

    def __init__(self, hour: int, subject: str, record: UsageRecord) -> None:
        self.hour = hour
        self.subject = subject
        self.record = record
        self.version = 0
        self.stored = 0

    def __repr__(self) -> str:
        return f"<Page {self.subject} [{len(self.record.entries)} entries]>"

    @property
    def data(self) -> bytes:
        """The record, as JSON."""
        return msgspec.json.encode(self.record)


class Tally:
    """One request whose tokens are counted.

    Args:
        counted: what another front end has counted of it.

    Attributes:
        stream: the key of the log of a resumable stream; empty for another request.
        prompt_at: the time and the instance by which its prompt was counted; None before, and where
            another front end has counted it.
        is_over: whether nothing more is counted.
    """

    def __init__(self, payer: Payer, counted: Tokens | None = None) -> None:
        self.payer = payer
        self.stream = ""
        self.counted = counted or Tokens()
        self.prompt_at: tuple[float, str] | None = None
        # Any tokens are counted with the request that they are of.
        self.is_request_counted = any(self.counted)
        self.is_over = False

    def __repr__(self) -> str:
        return f"<Tally of {self.payer.tenant} [{self.counted}]>"


class UsageBook:
    """The sums of one front end.

    Args:
        writer: the name of the front end, a token of subjects.
    """

    def __init__(self, writer: str) -> None:
        self._writer = writer
        # Of records: none takes the place of one that was dropped here, wherever the clock goes.
        self._numbers = itertools.count()
        # The requests that are resumable streams, by the keys of their logs.
        self._marked: dict[str, Tally] = {}
        # Those of an hour and a tenant, in their order.
        self._pages: dict[tuple[int, str], list[Page]] = {}
        self._entries: dict[tuple[int, Payer, str], tuple[Page, UsageEntry]] = {}

    def __repr__(self) -> str:
        return f"<UsageBook of {self._writer} [{len(self._entries)} entries]>"

    def mark(self, tally: Tally, stream: str, now: float) -> Page:
        """Have a request be a resumable stream that runs; returns the page that says so. A second
        request that would be the same stream is none.

        Args:
            stream: the key of its log.
            now: Unix seconds.
        """
        page = self._pages_of(int(now // HOUR), tally.payer.tenant)[0]
        if self._marked.setdefault(stream, tally) is not tally:
            return page
        tally.stream = stream
        page.record.open[stream] = tally.counted
        page.version += 1
        return page

    def count(self, tally: Tally, usage: Usage, instances: Sequence[str], now: float) -> list[Page]:
        """Count what a request has come to so far; the pages that have changed.

        What of its prompt was cached counts where its prompt does, whichever instance says it: that
        one may have been killed before it said anything.

        Args:
            usage: all of its tokens until now, wherever they were counted.
            instances: that had it; the last one has what is new.
            now: Unix seconds.
        """
        was = tally.counted
        counted = was.up_to(Tokens.of(usage))
        if tally.is_over or counted == was:
            return []
        is_new = not tally.is_request_counted
        tally.counted, tally.is_request_counted = counted, True
        new, at = counted.less(was), (now, instances[-1] if instances else "")
        if new.prompt and tally.prompt_at is None:
            tally.prompt_at = at
        changed: dict[Page, None] = {}
        for place, requests, tokens in (
            (at, int(is_new), Tokens(completion=new.completion)),
            (tally.prompt_at or at, 0, Tokens(new.prompt, new.cached)),
        ):
            if requests or any(tokens):
                page, entry = self._entry(tally.payer, *place)
                entry.add(requests, tokens)
                page.version += 1
                changed[page] = None
        if tally.stream:
            next(iter(changed)).record.open[tally.stream] = counted
        return [*changed]

    def end(self, tally: Tally) -> list[Page]:
        """Nothing more is counted of a request; the pages that say of it no longer that it runs."""
        tally.is_over = True
        self._marked.pop(tally.stream, None)
        ended: list[Page] = []
        for page in self.pages if tally.stream else ():
            if page.record.open.pop(tally.stream, None) is not None:
                page.version += 1
                ended.append(page)
        return ended

    @property
    def pages(self) -> Iterator[Page]:
        """All that it has."""
        return (page for pages in self._pages.values() for page in pages)

    def drop_before(self, now: float) -> None:
        """Drop the pages of earlier hours that are stored and have no stream that runs."""
        dropped = [
            (hour, tenant)
            for (hour, tenant), pages in self._pages.items()
            if hour < int(now // HOUR)
            and all(one.stored == one.version and not one.record.open for one in pages)
        ]
        for one in dropped:
            del self._pages[one]
        if dropped:
            self._entries = {
                key: one
                for key, one in self._entries.items()
                if (key[0], key[1].tenant) in self._pages
            }

    def _entry(self, payer: Payer, now: float, instance: str) -> tuple[Page, UsageEntry]:
        hour = int(now // HOUR)
        known = self._entries.get((hour, payer, instance))
        if known is None:
            pages = self._pages_of(hour, payer.tenant)
            if len(pages[-1].record.entries) >= MOST_ENTRIES:
                pages.append(self._new_page(hour, payer.tenant))
            entry = UsageEntry(payer.model, payer.key, instance)
            pages[-1].record.entries.append(entry)
            known = self._entries[hour, payer, instance] = pages[-1], entry
        return known

    def _pages_of(self, hour: int, tenant: str) -> list[Page]:
        pages = self._pages.get((hour, tenant))
        if pages is None:
            pages = self._pages[hour, tenant] = [self._new_page(hour, tenant)]
        return pages

    def _new_page(self, hour: int, tenant: str) -> Page:
        subject = usage_subject(hour * HOUR, tenant, self._writer, next(self._numbers))
        return Page(hour, subject, UsageRecord(tenant))


def usage_subject(at: float, tenant: str, writer: str, number: int = 0) -> str:
    """The subject of a record.

    Args:
        at: Unix seconds; its hour counts.
        writer: who alone writes it, a token of subjects.
        number: of the record among those of its writer.
    """
    hour = datetime.fromtimestamp(at, UTC).strftime("%Y%m%d.%H")
    return f"$KV.{USAGE_BUCKET}.{hour}.{tenant_token(tenant)}.{writer}.{number}"


def hour_of(subject: str) -> datetime:
    """The hour of a subject as `usage_subject` makes it.

    Raises:
        ValueError: it is none of such.
    """
    day, hour, *_ = subject.split(".")[-5:]
    return datetime.strptime(f"{day}{hour}", "%Y%m%d%H").replace(tzinfo=UTC)


def counted_of(records: Iterable[UsageRecord], stream: str) -> Tokens | None:
    """The tokens of a stream that are counted by the records of a front end; None where they know
    no such stream."""
    stated = [one.open[stream] for one in records if stream in one.open]
    return functools.reduce(Tokens.up_to, stated) if stated else None
