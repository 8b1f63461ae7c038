"""The election of one of several processes for work that one is enough for."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

import anyio
import msgspec

from dynbus import DynbusError, Unavailable
from dynbus.kvrouter.names import ELECTION_BUCKET, kv_election_subject
from dynbus.spi import (
    Bus,
    ComponentName,
    Grant,
    JetStream,
    LeasedRecord,
    NoStream,
    Openable,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    monotonic,
)

logger = logging.getLogger(__name__)

DEFAULT_TTL: Final = 10.0
MARKER_TTL: Final = 60.0

ELECTION_STREAM: Final = StreamConfig(
    name=f"KV_{ELECTION_BUCKET}",
    subjects=(f"$KV.{ELECTION_BUCKET}.>",),
    limits=StreamLimits(max_messages_per_subject=1, max_bytes=8 * 1024 * 1024),
    # Markers of what expired would let who writes here clear all by a roll-up.
    marker_ttl=0.0,
    description="dynbus: which router takes the snapshots of a component",
)


class ElectionRecord(msgspec.Struct, frozen=True):
    """The record of the elected one, as JSON."""

    holder: str


_decoder = msgspec.json.Decoder(ElectionRecord)


class Election(Openable):
    """Stands for election until closed; then another one may be elected at once. Use it with
    `async with`.

    The elected one is named by a leased record, which it renews.

    Args:
        holder: names this candidate; no other may have it.
        is_fit: whether it stands at this moment; who is elected and not fit steps back.
        ttl: whole seconds, one at least, after which the record of one that died is gone.
        bus: on whose control lane the record is renewed, so that nothing of the main loop delays
            that; it is renewed over `jetstream` unless given.
    """

    def __init__(
        self,
        jetstream: JetStream,
        namespace: str,
        component: str,
        holder: str,
        *,
        is_fit: Callable[[], bool] = lambda: True,
        ttl: float = DEFAULT_TTL,
        bus: Bus | None = None,
    ) -> None:
        super().__init__()
        self._jetstream = jetstream = jetstream if bus is None else bus.lane.connection.jetstream
        self._run_there: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]
        self._run_there = _here if bus is None else bus.lane.run
        self._holder = holder
        self._record = LeasedRecord(
            jetstream,
            ELECTION_STREAM.name,
            kv_election_subject(namespace, component),
            ttl,
            marker_ttl=MARKER_TTL,
            is_mine=self._is_mine,
            make=self._make_bucket,
            remake=self._remake_bucket,
        )
        self._is_fit = is_fit
        self._scopes: set[anyio.CancelScope] = set()
        self.failures = 0

    def __repr__(self) -> str:
        return f"<Election {self._record.subject} [elected: {self.is_elected}]>"

    @staticmethod
    def grant(component: ComponentName, purpose: str) -> Grant:
        """The grant of a candidate for the work of a component."""
        return Grant(purpose, (kv_election_subject(*component), *ELECTION_STREAM.to_look_up))

    @property
    def is_elected(self) -> bool:
        """True if nobody else can have been elected yet."""
        return self._record.lease.left(monotonic()) > 0

    @contextmanager
    def while_elected(self) -> Generator[anyio.CancelScope]:
        """Cancel what is within as soon as another one may be elected."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            self._set_deadlines()
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def _set_deadlines(self) -> None:
        until = anyio.current_time() + self._record.lease.left(monotonic())
        for scope in self._scopes:
            scope.deadline = until

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run)
                yield
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._resign()

    async def _run(self) -> None:
        while True:
            try:
                if self._is_fit():
                    await self._stand()
                elif self.is_elected:
                    await self._resign()
            except DynbusError as error:
                self.failures += 1
                await self._run_there(self._record.after_failure(error))
            except Exception:
                # Without a candidate no snapshot would ever be taken again.
                self.failures += 1
                logger.exception("%r: a round of the election failed", self)
            else:
                # Who is not elected writes nothing.
                self._record.start_anew()
            self._set_deadlines()
            await anyio.sleep(self._record.pause())

    async def _stand(self) -> None:
        if not self.is_elected:
            try:
                await self._run_there(self._record.look())
            except NoStream:
                pass  # Writing makes it.
            else:
                if self._record.is_taken:
                    return
        data = msgspec.json.encode(ElectionRecord(self._holder))
        await self._run_there(self._record.write(data))

    async def _resign(self) -> None:
        for scope in self._scopes:
            scope.cancel()
        with suppress(Unavailable):
            # The lane is closed: the record expires by itself.
            await self._run_there(self._record.withdraw())

    def _is_mine(self, stored: StoredMessage) -> bool:
        try:
            return _decoder.decode(stored.data).holder == self._holder
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False

    async def _make_bucket(self) -> None:
        await self._jetstream.ensure_stream(ELECTION_STREAM)

    async def _remake_bucket(self) -> None:
        # The disk that broke it may be full still, and a record lives for some seconds only.
        await self._jetstream.ensure_stream(ELECTION_STREAM._replace(in_memory=True))


async def _here(work: Coroutine[Any, Any, Any]) -> Any:
    return await work
