"""`RunningStream`: a resumable stream that this front end goes on with.

What the engine sends is stored before it is told. What comes while a record is on its way is the
next record, so one record holds what one step brings, or several.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, cast

import anyio
import anyio.abc

from dynbus import Arrival, Cancelled, Context, DynbusError, InvalidResponse
from dynbus.llm.answers import Usage
from dynbus.llm.pipeline.serving import Completion, Part
from dynbus.spi import WrongLastSequence, describe_exception, monotonic, unix_time

from .events import NumberedSink
from .readers import Readers
from .records import (
    KEPT_SECONDS,
    Came,
    Owned,
    Piece,
    StreamLog,
    failed_with,
    failure,
)
from .store import STORE_TIMEOUT, StreamStore

logger = logging.getLogger(__name__)

LOOK_INTERVAL: Final = 1.0
"""Seconds between two looks whether anybody reads."""

QUIET_INTERVAL: Final = KEPT_SECONDS / 4
"""Seconds without a record after which an empty one is stored. Once its owner is dead, the age of a
log is all that is known of when the stream was last told to somebody."""

BURY_INTERVAL: Final = 1.0
"""Seconds between two attempts to replace a log that must not be gone on with."""


class AnswerClock:
    """The time that an answer tells: when the items came that it is made of.

    Attributes:
        at: Unix seconds.
    """

    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


class _NoStream:
    """The engine's stream of items that were stored: there is none."""

    def cancel(self) -> None:
        """Leave it."""


class _Waiting(NamedTuple):
    piece: Piece
    arrival: Arrival[Part, bytes]
    now: float


def stored_arrival(piece: Piece) -> Arrival[Part, bytes]:
    """The arrival that a piece of a log was when it came."""
    return Arrival(cast("Any", _NoStream()), piece.items, piece.ended, failed_with(piece))


def take_stored(
    completion: Completion, part: int, arrival: Arrival[Part, bytes], now: float
) -> None:
    """Have a completion take what was stored of its answer, whatever an engine has sent."""
    try:
        completion.receive(part, arrival, now)
    except Exception as error:
        logger.exception("what an engine sent cannot be read")
        completion.end(
            InvalidResponse(f"an item of the engine does not fit: {describe_exception(error)}")
        )


class RunningStream:
    """A resumable stream that this front end goes on with, read or not.

    A stream that nobody reads is paused after a while: its engine is left, as no credit of its
    reader would make that free for others, and its next reader goes on with it.

    Args:
        key: of its log.
        tenant: whose it is.
        log: as far as it was written.
        completion: has taken all that the log holds; its sink is `sink`.
        clock: of the answer's format.
        begin: sends the request to engines.
        context: of the calls for it.
        counted: told what became of it.
        on_lost: called when another front end goes on with it, so that nothing more is told here.
        on_left: called with the stream when its reader here has left.

    Attributes:
        is_logged: whether another front end could go on with it.
        is_taken: whether one does.
        sent: set once the request was sent to an engine, or could not be.
    """

    def __init__(
        self,
        store: StreamStore,
        key: str,
        tenant: str,
        log: StreamLog,
        completion: Completion,
        sink: NumberedSink,
        clock: AnswerClock,
        begin: Callable[[Completion], Awaitable[None]],
        context: Context,
        counted: Callable[[str], object],
        on_lost: Callable[[], object],
        on_left: Callable[[RunningStream], object],
    ) -> None:
        self.key = key
        self.tenant = tenant
        self.is_logged = True
        self.is_taken = False
        self.sent = anyio.Event()
        self._store = store
        self._log = log
        self._completion = completion
        self._sink = sink
        self._clock = clock
        self._begin = begin
        self._context = context
        self._counted = counted
        self._on_lost = on_lost
        self._on_left = on_left
        self._waiting: list[_Waiting] = []
        self._news = asyncio.Event()
        self._readers = Readers(monotonic(), log.size)
        self._stored_at = monotonic()
        self._runs = True
        self._when_done: list[Callable[[], object]] = []
        # Why its log has to be replaced, as soon as that can be.
        self._to_bury = ""
        completion.taker = self

    def __repr__(self) -> str:
        state = "read" if self._sink.to is not None else "unread"
        return f"<RunningStream {self.key} [{state}, {self._log!r}]>"

    # As work of an exchange ---------------------------------------------------------------------

    @property
    def answer_id(self) -> str:
        """Of its answer."""
        return self._completion.answer_id

    @property
    def usage(self) -> Usage | None:
        """The tokens so far."""
        return self._completion.usage

    @property
    def finish_reasons(self) -> Sequence[str]:
        """Of the outputs that have ended."""
        return self._completion.finish_reasons

    @property
    def instances(self) -> Sequence[str]:
        """The ids of the engines that work for it."""
        return self._completion.instances

    def cancel(self, error: DynbusError | None = None) -> None:
        """Its reader has left: it goes on for a while, for the next one."""
        if self._sink.to is not None:
            self._sink.to = None
            self._readers.left(monotonic(), self._log.size)
            self._news.set()
            self._on_left(self)

    def when_done(self, then: Callable[[], object]) -> None:
        """Have `then` called when nothing more is made for it here; at once where that is so."""
        if self._runs:
            self._when_done.append(then)
        else:
            then()

    def seen(self) -> None:
        """Somebody reads it at another front end, or asks for it."""
        self._readers.seen(monotonic(), self._log.size)

    @property
    def is_unread(self) -> bool:
        """True if nobody reads it."""
        return self._sink.to is None and self._readers.are_gone(monotonic())

    def pause(self) -> None:
        """Leave its engine to others: its next reader goes on with it."""
        self._readers.ask_to_pause()
        self._news.set()

    # What engines send --------------------------------------------------------------------------

    def receive(self, part: int, arrival: Arrival[Part, bytes], now: float) -> None:
        """Take what has arrived of one stream."""
        error = None if arrival.error is None else failure(arrival.error)
        items = list(arrival.items)
        piece = Piece(unix_time(), part, items, arrival.ended, error)
        # The error as all others will know it.
        self._waiting.append(_Waiting(piece, arrival._replace(error=failed_with(piece)), now))
        self._news.set()

    def end(self, error: DynbusError | None) -> None:
        """There is no more."""
        self._fail(error or Cancelled("the engine's stream was left"))

    def _fail(self, error: DynbusError) -> None:
        piece = Piece(unix_time(), 0, [], True, failure(error))
        self._waiting.append(_Waiting(piece, stored_arrival(piece), 0.0))
        self._news.set()

    # Life ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry it out, to its end or until it is paused."""
        self._context.enter()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send)
                await self._tell(tasks)
                tasks.cancel_scope.cancel()
        finally:
            is_over = self._sink.is_over
            if not is_over:
                self._completion.cancel()
                self._context.kill()
            self._runs = False
            for then in self._when_done:
                then()
            if not is_over:
                with anyio.move_on_after(STORE_TIMEOUT, shield=True):
                    await self._leave()
            with anyio.move_on_after(STORE_TIMEOUT, shield=True):
                await self._bury()

    async def _keep_burying(self) -> None:
        """Bury it as soon as that can be, beside the telling, which waits for no bus any more."""
        while self._to_bury:
            await anyio.sleep(BURY_INTERVAL)
            await self._bury()

    async def _send(self) -> None:
        try:
            await self._begin(self._completion)
        except DynbusError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the stream %s could not be sent to an engine", self.key)
            self._fail(DynbusError(f"the front end failed: {describe_exception(error)}"))
        finally:
            self.sent.set()

    async def _tell(self, tasks: anyio.abc.TaskGroup) -> None:
        """Tell what comes, until there is no more of it or it does not go on here."""
        while not self._sink.is_over:
            if not self._waiting:
                self._news.clear()
                with anyio.move_on_after(LOOK_INTERVAL):
                    await self._news.wait()
            if self._is_to_pause():
                self._counted("paused" if self.is_logged else "left")
                return
            waiting, self._waiting = self._waiting, []
            is_quiet = monotonic() - self._stored_at > QUIET_INTERVAL
            if not self.is_logged:
                self._take(waiting)
                await self._settle()
            elif waiting or is_quiet:
                # It is counted before it is stored: who goes on with it knows both.
                self._sink.hold()
                self._take(waiting)
                # So is what is to be done before the end: who reads a whole log finds it done.
                await self._settle()
                is_own = True
                with anyio.CancelScope(shield=True):
                    is_own = await self._store_pieces([one.piece for one in waiting])
                if not is_own:
                    return
                if self._to_bury:
                    tasks.start_soon(self._keep_burying)
                self._sink.release()
        if self.is_logged:
            self._store.ended(self.key, self._log, f"it ended more than {KEPT_SECONDS:g} s ago")

    async def _settle(self) -> None:
        if self._sink.settle is not None:
            await self._sink.settle(is_own=True)

    def _take(self, waiting: Sequence[_Waiting]) -> None:
        for piece, arrival, now in waiting:
            self._clock.at = piece.at
            take_stored(self._completion, piece.part, arrival, now)

    def _is_to_pause(self) -> bool:
        if self._sink.to is not None:
            return False
        return not self.is_logged or self._readers.have_it_paused(monotonic(), self._log.size)

    async def _store_pieces(self, pieces: list[Piece]) -> bool:
        """Store what is told next, as far as that can be; False when somebody else goes on."""
        self._stored_at = monotonic()
        record = Came(pieces)
        size = len(self._log.encode(record))
        if not self._log.has_room(size):
            self._give_up("too_large", "it has become too large")
        elif not await self._store.make_room(self.tenant, size):
            self._give_up("over_share", "its tenant has more streams than are kept of one")
        if not self.is_logged:
            await self._bury()
            return True
        try:
            await self._store.append(self.key, self._log, record)
        except WrongLastSequence:
            if await self._has_new_owner():
                self.is_logged, self.is_taken = False, True
                self._store.uncount(self.key, self._log)
                self._counted("lost")
                if self._sink.to is not None:
                    self._on_lost()
                return False
            self._give_up("unlogged", "it could not be stored")
        except DynbusError as error:
            logger.warning("the stream %s is not resumable any more: %s", self.key, error)
            self._give_up("unlogged", "it could not be stored")
        return True

    async def _has_new_owner(self) -> bool:
        """True if another front end goes on with it; the log may also be lost with the server."""
        try:
            last = await self._store.last(self.key)
        except DynbusError:
            return False
        return last is not None

    def _give_up(self, what: str, why: str) -> None:
        self.is_logged = False
        self._store.uncount(self.key, self._log)
        self._to_bury = why
        self._counted(what)
        self._sink.give_up()

    async def _bury(self) -> None:
        """See that nobody goes on with what its reader was told more of."""
        if self._to_bury and await self._store.bury(self.key, self._to_bury):
            self._to_bury = ""

    async def _leave(self) -> None:
        """Let others know that nobody goes on with it here."""
        if not self.is_logged:
            return
        try:
            await self._store.append(self.key, self._log, Owned(""))
        except DynbusError as error:
            logger.debug("the stream %s was not handed on: %s", self.key, error)
        self._store.ended(self.key, self._log, f"nobody read it for {KEPT_SECONDS:g} s")
