"""`ResumableStreams`: those that one front end goes on with."""

from __future__ import annotations

import logging
from collections import Counter
from types import TracebackType
from typing import Self

import anyio

from dynbus.actors import Runtime
from dynbus.bus.background import Background
from dynbus.bus.errors import DynbusError, Overloaded, PayloadTooLarge
from dynbus.bus.transport import WrongLastSequence

from .records import MOST_REQUEST, Begun, Owned, StreamLog, is_over
from .running import RunningStream
from .store import StreamStore

logger = logging.getLogger(__name__)


class ResumableStreams:
    """The resumable streams of one front end, while it is open.

    Args:
        most: streams that it goes on with at a time.

    Attributes:
        store: what it reads and writes of them.
        counts: how often what became of one: `begun`, `followed`, `taken_over`; and
            `left` by all readers, `lost` to another front end, `too_large`, `unlogged`.
    """

    def __init__(self, runtime: Runtime, most: int) -> None:
        self.store = StreamStore(runtime, self.owns)
        self.counts: Counter[str] = Counter()
        self._most = most
        self._running: dict[str, RunningStream] = {}
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

    async def begin(self, key: str, begun: Begun) -> StreamLog:
        """The log of a new stream.

        Raises:
            DynbusError: it cannot be, and why.
        """
        if len(self._running) >= self._most:
            raise Overloaded(f"{self._most} resumable streams run already")
        if len(begun.body) > MOST_REQUEST:
            raise PayloadTooLarge(
                f"the request has {len(begun.body)} bytes, and at most {MOST_REQUEST} are stored"
            )
        await self.store.make_ready()
        log = StreamLog()
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
            if self._running.get(stream.key) is stream:
                del self._running[stream.key]

    def owns(self, key: str) -> bool:
        """Whether this front end goes on with a stream, for somebody who would read it."""
        stream = self._running.get(key)
        if stream is None or not stream.is_logged:
            return key in self._claimed
        stream.seen()
        return True
