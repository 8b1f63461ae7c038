"""`UsageRecorder`: what the tenants of a front end use is written to the bus."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

import anyio
import msgspec

from dynbus import DynbusError, PayloadTooLarge, Runtime
from dynbus.llm.answers import Usage
from dynbus.spi import JetStream, NoStream, Openable, StreamConfig, StreamLimits, unix_time

from .keys import tenant_token
from .usage import USAGE_BUCKET, Page, Tally, Tokens, UsageBook, UsageRecord, counted_of

logger = logging.getLogger(__name__)

MAX_AGE: Final = 400 * 24 * 3600.0
"""Seconds for which it is known what was used."""

USAGE_STREAM: Final = StreamConfig(
    name=f"KV_{USAGE_BUCKET}",
    subjects=(f"$KV.{USAGE_BUCKET}.>",),
    limits=StreamLimits(
        max_messages_per_subject=1,
        max_bytes=1024 * 1024 * 1024,
        max_age=MAX_AGE,
        max_message_size=1024 * 1024,
    ),
    description="dynbus: what tenants have used",
)

STORE_INTERVAL: Final = 1.0
"""Seconds after which what requests that run have come to is written, and what could not be."""

STORE_TIMEOUT: Final = 2.0

ASK_TIMEOUT: Final = 0.5
"""Seconds that a stream which is gone on with waits to know what is counted of it."""

AT_A_TIME: Final = 8
"""Records that are written at a time."""

_decoder: Final = msgspec.json.Decoder(UsageRecord)


def read_record(data: bytes) -> UsageRecord:
    """A record.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _decoder.decode(data)


async def store(jetstream: JetStream, subject: str, record: UsageRecord) -> None:
    """Store a record, in place of what was there.

    Raises:
        DynbusError: it could not be, or nobody knows.
    """
    data = msgspec.json.encode(record)
    try:
        await jetstream.publish(subject, data, timeout=STORE_TIMEOUT)
    except NoStream:
        await jetstream.ensure_stream(USAGE_STREAM, timeout=STORE_TIMEOUT)
        await jetstream.publish(subject, data, timeout=STORE_TIMEOUT)


class Counted(Protocol):
    """The work for a request, as far as it is counted."""

    @property
    def usage(self) -> Usage | None:
        """The tokens so far; None where the engine counts them."""
        ...

    @property
    def instances(self) -> Sequence[str]:
        """The ids of the engines that work for it."""
        ...


class UsageRecorder(Openable):
    """Counts what the requests of a front end use, and writes it, while it is open.

    A request that has ended is written before its client is told the end, without waiting for an
    answer: so it is counted, whatever dies then. Each second what has changed is written again, and
    answered for.

    Args:
        me: the name of this front end.
    """

    def __init__(self, runtime: Runtime, me: str) -> None:
        super().__init__(runtime.background)
        self._connection = runtime.bus.data
        self._book = UsageBook(me)
        self._running: dict[Tally, Counted] = {}
        self._logged = ""

    def __repr__(self) -> str:
        return f"<UsageRecorder {self._book!r} [{len(self._running)} requests]>"

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        await self._make_bucket()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_storing)
            yield
            tasks.cancel_scope.cancel()
        with anyio.move_on_after(2 * STORE_TIMEOUT, shield=True):
            await self._store()

    async def _make_bucket(self) -> None:
        """Have the bucket be there before the first request ends: what is written before would be
        lost with this process."""
        try:
            await self._connection.jetstream.ensure_stream(USAGE_STREAM, timeout=STORE_TIMEOUT)
        except DynbusError as error:
            # It is made when something is stored.
            self._log(f"{type(error).__name__}: {error}")

    # Requests -----------------------------------------------------------------------------------

    def begin(self, tally: Tally, work: Counted) -> None:
        """Count what a request comes to from here on."""
        self._running[tally] = work

    def mark(self, tally: Tally, stream: str) -> None:
        """Have it known what is counted of a resumable stream, before it runs here.

        Args:
            stream: the key of its log.
        """
        self._write([self._book.mark(tally, stream, unix_time())])

    def count(self, tally: Tally, usage: Usage) -> None:
        """Count what a request has come to, and have it on its way when this returns."""
        self._write(self._book.count(tally, usage, self._instances(tally), unix_time()))

    def _instances(self, tally: Tally) -> Sequence[str]:
        work = self._running.get(tally)
        return work.instances if work is not None else ()

    def end(self, tally: Tally, usage: Usage | None) -> None:
        """Count all that a request has come to, as `count` does; later calls change nothing.

        Args:
            usage: None where what was counted before is all that counts.
        """
        if tally.is_over:
            return
        changed: list[Page] = []
        if usage is not None:
            changed += self._book.count(tally, usage, self._instances(tally), unix_time())
        self._running.pop(tally, None)
        changed += self._book.end(tally)
        self._write(dict.fromkeys(changed))

    # Records ------------------------------------------------------------------------------------

    def _write(self, pages: Collection[Page]) -> None:
        """Write pages at once. Where that cannot be, it is done within a second once it can."""
        if not pages:
            return
        try:
            for page in pages:
                self._connection.publish(page.subject, page.data)
        except PayloadTooLarge as error:
            logger.error("what a tenant has used cannot be written: %s", error)
        self._connection.send_now()

    async def counted_of(self, tenant: str, writer: str, stream: str) -> Tokens | None:
        """The tokens of a resumable stream that a front end which is gone has counted; None where
        that is not known.
        """
        subject = f"$KV.{USAGE_BUCKET}.*.*.{tenant_token(tenant)}.{writer}.*"
        try:
            stored = await self._connection.jetstream.read(
                USAGE_STREAM.name, subject, timeout=ASK_TIMEOUT
            )
            return counted_of([read_record(one.data) for one in stored], stream)
        except NoStream:
            return None
        except (DynbusError, msgspec.DecodeError) as error:
            logger.warning(
                "what %s has counted of the stream %s is not known, and counts as all that it "
                "made: %s",
                writer,
                stream,
                error,
            )
            return None

    async def _keep_storing(self) -> None:
        while True:
            await anyio.sleep(STORE_INTERVAL)
            now = unix_time()
            for tally, work in self._running.items():
                usage = work.usage
                if usage is not None and work.instances:
                    self._book.count(tally, usage, work.instances, now)
            await self._store()
            self._book.drop_before(now)

    async def _store(self) -> None:
        changed = [page for page in self._book.pages if page.stored != page.version]
        limiter = anyio.Semaphore(AT_A_TIME)
        problems: list[str] = []
        async with anyio.create_task_group() as tasks:
            for page in changed:
                tasks.start_soon(self._store_page, page, limiter, problems)
        self._log(problems[0] if problems else "")

    async def _store_page(self, page: Page, limiter: anyio.Semaphore, problems: list[str]) -> None:
        async with limiter:
            if problems:
                return
            jetstream = self._connection.jetstream
            try:
                version = page.version
                await store(jetstream, page.subject, page.record)
            except DynbusError as error:
                problems.append(f"{type(error).__name__}: {error}")
                return
            page.stored = version

    def _log(self, problem: str) -> None:
        if problem == self._logged:
            return
        self._logged = problem
        if problem:
            logger.warning("what tenants use is kept here until it can be stored: %s", problem)
        else:
            logger.info("what tenants use is stored again")
