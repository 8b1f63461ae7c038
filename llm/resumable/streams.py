"""`ResumableStreams`: those that one front end goes on with."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from types import TracebackType
from typing import Final, Self

import anyio

from dynbus import DynbusError, Overloaded, PayloadTooLarge, Runtime
from dynbus.llm.pipeline.serving import RequestTiming
from dynbus.spi import Background, WrongLastSequence

from .records import MOST_REQUEST, Begun, Owned, StreamLog, is_over
from .running import RunningStream
from .store import StreamStore

logger = logging.getLogger(__name__)

MOST_UNREAD: Final = 8
"""Streams of one tenant that nobody reads and that go on all the same, for a while."""

LONG_WAIT: Final = 0.05
"""Seconds that a request waits for its first token before a stream that nobody reads is paused."""


class ResumableStreams:
    """The resumable streams of one front end, while it is open.

    Args:
        most: streams that it goes on with at a time.

    Attributes:
        store: what it reads and writes of them.
        counts: how often what became of one: `begun`, `followed`, `taken_over`; and
            `paused` since nobody read it, `left` for good by its reader, `lost` to another front
            end, `too_large`, `over_share`, `unlogged`.
    """

    def __init__(self, runtime: Runtime, most: int) -> None:
        self.store = StreamStore(runtime, self.owns)
        self.counts: Counter[str] = Counter()
        self._most = most
        self._running: dict[str, RunningStream] = {}
        self._running_of: Counter[str] = Counter()
        # Those without a reader here; the first one is the first to be paused.
        self._unread: OrderedDict[str, RunningStream] = OrderedDict()
        # The streams of which it is being stored that this front end goes on with them, and how
        # many times over: several may be resumed here at a time.
        self._claimed: Counter[str] = Counter()
        self._background = Background(f"the background of {self!r}", runtime.bus.fail)

    def __repr__(self) -> str:
        return f"<ResumableStreams [{len(getattr(self, '_running', ()))} run]>"

    async def __aenter__(self) -> Self:
        await self._background.open()
        self._background.start(self.store.sweep, name="dropping the logs of streams")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            self.store.close()
            await self._background.close()

    async def begin(self, key: str, begun: Begun, tenant: str = "") -> StreamLog:
        """The log of a new stream.

        Args:
            tenant: whose it is.

        Raises:
            DynbusError: it cannot be, and why.
        """
        if len(self._running) >= self._most:
            raise Overloaded(f"{self._most} resumable streams run already")
        share = max(1, self._most // 2)
        if tenant and self._running_of[tenant] >= share:
            raise Overloaded(f"{share} resumable streams of this tenant run already")
        if len(begun.body) > MOST_REQUEST:
            raise PayloadTooLarge(
                f"the request has {len(begun.body)} bytes, and at most {MOST_REQUEST} are stored"
            )
        await self.store.make_ready()
        if not await self.store.make_room(tenant, len(begun.body)):
            raise Overloaded("as much is stored already of streams as there may be of one tenant")
        log = StreamLog(tenant)
        try:
            try:
                await self.claim(key, log, begun)
            except WrongLastSequence:
                last = await self.store.last(key)
                if last is None or not is_over(last.data):
                    raise
                log.sequence = last.sequence
                await self.claim(key, log, begun)
        except WrongLastSequence:
            raise DynbusError(
                f"there is a stream of the request id {begun.request_id} already"
            ) from None
        self.counts["begun"] += 1
        return log

    async def claim(self, key: str, log: StreamLog, record: Begun | Owned) -> None:
        """Store that this front end goes on with a stream; `start` has to follow before anything
        is waited for.

        Others may read the record before this front end is told that it is stored: who asks until
        then learns that it goes on here, and does not take the stream away from it.

        Raises:
            WrongLastSequence: somebody else has written.
            DynbusError: it could not be stored, or nobody knows.
        """
        self._claimed[key] += 1
        try:
            await self.store.append(key, log, record)
        finally:
            self._claimed[key] -= 1
            if not self._claimed[key]:
                del self._claimed[key]

    def start(self, stream: RunningStream) -> None:
        """Carry a stream out beside all else.

        Raises:
            RuntimeError: the front end is closed.
            Unavailable: it has failed.
        """
        self._background.start(self._run, stream, name=f"the stream {stream.key}")
        self._running[stream.key] = stream
        self._running_of[stream.tenant] += 1

    def count(self, what: str) -> None:
        """Count what became of a stream."""
        self.counts[what] += 1

    async def _run(self, stream: RunningStream) -> None:
        try:
            await stream.run()
        except Exception:
            # Whatever an engine has sent ends its own stream, and nobody else's.
            logger.exception("%r failed", stream)
        finally:
            self._running_of[stream.tenant] -= 1
            if not self._running_of[stream.tenant]:
                del self._running_of[stream.tenant]
            for known in (self._running, self._unread):
                if known.get(stream.key) is stream:
                    del known[stream.key]

    def owns(self, key: str) -> bool:
        """True if this front end goes on with a stream for a reader that may come."""
        stream = self._running.get(key)
        if stream is None or not stream.is_logged:
            return key in self._claimed
        stream.seen()
        if key in self._unread:
            self._unread.move_to_end(key)
        return True

    # Those that nobody reads -------------------------------------------------------------------

    def left(self, stream: RunningStream) -> None:
        """The reader of a stream has left, who may come back."""
        if self._running.get(stream.key) is not stream:
            return
        self._unread[stream.key] = stream
        unread = [one for one in self._unread.values() if one.is_unread]
        own = [one for one in unread if one.tenant == stream.tenant]
        for one in own[:-MOST_UNREAD]:
            self._pause(one)

    def make_way(self, timing: RequestTiming) -> None:
        """See that a request which begins does not wait for streams that nobody reads: as long as
        no token of it has come, one of them is paused after the other."""
        asyncio.get_running_loop().call_later(LONG_WAIT, self._look_at, timing)

    def _look_at(self, timing: RequestTiming) -> None:
        longest = next((one for one in self._unread.values() if one.is_unread), None)
        if timing.waits and longest is not None:
            self._pause(longest)
            self.make_way(timing)

    def _pause(self, stream: RunningStream) -> None:
        del self._unread[stream.key]
        stream.pause()
