"""Which one of several processes does what one is enough for.

The elected one is named by a record with a TTL, which it renews. `Candidacy` decides what to
write and what an answer means; `Election` carries it out.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import anyio
import msgspec

from dynbus.bus.background import Openable
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import DynbusError, Unavailable
from dynbus.bus.protocol.names import KV_ELECTION_BUCKET, kv_election_subject
from dynbus.bus.records.stream_repair import StreamRepair
from dynbus.bus.transport import (
    REPLICAS,
    JetStream,
    NoStream,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    WrongLastSequence,
)

logger = logging.getLogger(__name__)

DEFAULT_TTL: Final = 10.0
MARKER_TTL: Final = 60.0
RESIGN_TIMEOUT: Final = 2.0

ELECTION_STREAM: Final = StreamConfig(
    name=f"KV_{KV_ELECTION_BUCKET}",
    subjects=(f"$KV.{KV_ELECTION_BUCKET}.>",),
    limits=StreamLimits(max_messages_per_subject=1, max_bytes=8 * 1024 * 1024),
    marker_ttl=MARKER_TTL,
    replicas=REPLICAS,
    description="dynbus: which router takes the snapshots of a component",
)


class ElectionRecord(msgspec.Struct, frozen=True):
    """What the elected one has stored, as JSON."""

    holder: str


_decoder = msgspec.json.Decoder(ElectionRecord)


class Candidacy:
    """One candidate's part in an election, without I/O. Times are of one monotonic clock.

    Args:
        holder: names this candidate; no other has it.
        ttl: seconds for which a record lasts.
    """

    def __init__(self, holder: str, ttl: float) -> None:
        self.holder = holder
        self.ttl = ttl
        self._revision = 0
        self._until: float | None = None

    def __repr__(self) -> str:
        return f"<Candidacy {self.holder} [rev {self._revision} | until {self._until}]>"

    @property
    def revision(self) -> int:
        """Which last sequence its own next write expects."""
        return self._revision

    def is_elected(self, now: float) -> bool:
        """Whether nobody else can have been elected yet."""
        return self.left(now) > 0

    def left(self, now: float) -> float:
        """Seconds for which it is elected if nothing else happens; 0 for not elected."""
        return 0.0 if self._until is None else max(0.0, self._until - now)

    def found(self, stored: StoredMessage | None) -> bool:
        """This is what is stored now; returns whether to write over it."""
        self._revision = 0 if stored is None else stored.sequence
        if stored is None or stored.is_marker:
            return True
        if _holder(stored.data) == self.holder:
            # The answer to a write of its own was lost.
            return True
        self._until = None
        return False

    def stored(self, sequence: int, begun: float) -> None:
        """A write that was begun at `begun` was stored: the record lasts that long at least."""
        self._revision = sequence
        self._until = begun + self.ttl

    def lost(self) -> None:
        """Another one was faster, or nothing that was stored is there any longer."""
        self._until = None


def _holder(data: bytes) -> str | None:
    try:
        return _decoder.decode(data).holder
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class Election(Openable):
    """Stands for election until closed. Use it with `async with`.

    Args:
        holder: names this candidate; no other may have it.
        is_fit: whether it stands at this moment; who is elected and not fit steps back.
        ttl: whole seconds, one at least, after which the record of one that died is gone.
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
    ) -> None:
        self._jetstream = jetstream
        self._subject = kv_election_subject(namespace, component)
        self._candidacy = Candidacy(holder, ttl)
        self._repair = StreamRepair(jetstream, ELECTION_STREAM.name, self._make_bucket)
        self._is_fit = is_fit
        self._scopes: set[anyio.CancelScope] = set()
        self.failures = 0
        self._told = ""

    def __repr__(self) -> str:
        return f"<Election {self._subject} [elected: {self.is_elected}]>"

    @property
    def is_elected(self) -> bool:
        return self._candidacy.is_elected(monotonic())

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

    @contextmanager
    def while_elected(self) -> Generator[anyio.CancelScope]:
        """Cancel what is within as soon as another one may be elected."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            self._limit(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def _limit(self, *scopes: anyio.CancelScope) -> None:
        until = anyio.current_time() + self._candidacy.left(monotonic())
        for scope in scopes:
            scope.deadline = until

    async def _run(self) -> None:
        while True:
            try:
                if self._is_fit():
                    await self._stand()
                elif self.is_elected:
                    await self._resign()
                self._told = ""
            except DynbusError as error:
                self.failures += 1
                # A round comes every few seconds: what goes on is told once.
                level = logging.DEBUG if str(error) == self._told else logging.WARNING
                logger.log(level, "%r: %s", self, error)
                self._told = str(error)
                if isinstance(error, Unavailable):
                    await self._look_after_bucket()
            except Exception:
                # Without a candidate no snapshot would ever be taken again.
                self.failures += 1
                logger.exception("%r: a round failed", self)
            self._limit(*self._scopes)
            await anyio.sleep(self._candidacy.ttl / 3)

    async def _look_after_bucket(self) -> None:
        """Make the bucket again where its server can store nothing in it any more."""
        try:
            await self._repair.look()
        except DynbusError as error:
            logger.debug("%r: the bucket was not looked at: %s", self, error)

    async def _make_bucket(self) -> None:
        # The disk that broke it may be full still, and a record lives for some seconds only.
        await self._jetstream.ensure_stream(ELECTION_STREAM._replace(in_memory=True))

    async def _stand(self) -> None:
        candidacy = self._candidacy
        if not self.is_elected:
            try:
                stored = await self._jetstream.last(ELECTION_STREAM.name, self._subject)
            except NoStream:
                await self._jetstream.ensure_stream(ELECTION_STREAM)
                stored = None
            if not candidacy.found(stored):
                return
        begun = monotonic()
        try:
            sequence = await self._jetstream.publish(
                self._subject,
                msgspec.json.encode(ElectionRecord(candidacy.holder)),
                ttl=candidacy.ttl,
                expected_last_subject_sequence=candidacy.revision,
                timeout=candidacy.ttl / 4,
            )
        except (WrongLastSequence, NoStream):
            candidacy.lost()
        else:
            candidacy.stored(sequence, begun)

    async def _resign(self) -> None:
        """Withdraw the record; if that fails, it expires by itself."""
        if not self.is_elected:
            return
        self._candidacy.lost()
        self._limit(*self._scopes)
        try:
            await self._jetstream.publish(
                self._subject,
                b"",
                ttl=MARKER_TTL,
                headers={"KV-Operation": "DEL"},
                expected_last_subject_sequence=self._candidacy.revision,
                timeout=RESIGN_TIMEOUT,
            )
        except DynbusError as error:
            logger.info("%r: its record expires by itself: %s", self, error)
