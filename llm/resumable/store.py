"""The logs of resumable streams on the bus, and the question whether an owner lives."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio

from dynbus import DynbusError, PermissionDenied, Runtime, Unavailable
from dynbus.llm.resumable.names import (
    STREAM_LOGS,
    STREAM_LOGS_MARK,
    stream_log_subject,
    stream_owner_subject,
)
from dynbus.spi import (
    Grant,
    Message,
    NoStream,
    ServerClock,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    Subscription,
    WrongLastSequence,
    monotonic,
    random_id,
)

from .records import KEPT_SECONDS, Begun, Over, Owned, OwnerWatch, Record, StreamLog

logger = logging.getLogger(__name__)

MOST_STORED: Final = 256 * 1024 * 1024
"""Bytes of all logs; the oldest records go first."""

MOST_OF_TENANT: Final = MOST_STORED // 8
"""Bytes of one tenant's logs that a front end has stored and keeps: the room is for all tenants,
and what is beyond it would take the beginning of others' logs."""

MAX_AGE: Final = 3600.0
"""Seconds for which a record is kept: an answer that takes longer is not resumed."""

STORE_TIMEOUT: Final = 1.0
"""Seconds that tokens wait until they are stored at most."""

SWEEP_INTERVAL: Final = 5.0

YES: Final = b"1"
NO: Final = b"0"

LOGS_STREAM: Final = StreamConfig(
    STREAM_LOGS,
    (stream_log_subject("*"),),
    StreamLimits(max_bytes=MOST_STORED, max_age=MAX_AGE),
    rollup=True,
    in_memory=True,
    description="dynbus: logs of resumable streams",
)


class StreamStore:
    """The store of resumable streams that a front end reads and writes.

    Nothing is made on the bus before the first of them.

    Args:
        owns: whether this front end goes on with the stream of a key; it learns by this of a
            reader elsewhere.

    Attributes:
        me: the name of this front end.
    """

    def __init__(self, runtime: Runtime, owns: Callable[[str], bool]) -> None:
        self.me = random_id()
        self._bus = runtime.bus
        self._owns = owns
        self._jetstream = runtime.bus.data.jetstream
        self._answers = f"{runtime.bus.replies.base}.{self.me}"
        self._watches: dict[str, OwnerWatch] = {}
        self._subscriptions: list[Subscription] = []
        self._clock = ServerClock()
        self._is_ready = False
        self._getting_ready = anyio.Lock()
        self._asked = 0
        # What is stored of each stream, and of all of a tenant.
        self._sizes: dict[str, int] = {}
        self._stored_of: Counter[str] = Counter()
        # The logs of streams that nobody goes on with here, when and why they are dropped.
        self._ended: dict[str, tuple[StreamLog, float, str]] = {}

    def __repr__(self) -> str:
        return f"<StreamStore {self.me[:8]}>"

    def close(self) -> None:
        """Answer no more questions: an asker takes this front end for gone."""
        for subscription in self._subscriptions:
            subscription.unsubscribe()
        self._subscriptions = []

    async def make_ready(self) -> None:
        """Make the stream of the logs where it is missing, and answer questions from now on.

        Raises:
            DynbusError: the bus does not allow it, or is away.
        """
        if self._is_ready:
            return
        async with self._getting_ready:
            if self._is_ready:
                return
            data = self._bus.data
            await self._jetstream.ensure_stream(
                LOGS_STREAM, probe=stream_log_subject(self.me), timeout=STORE_TIMEOUT
            )
            await self._read_clock()
            if not self._subscriptions:
                self._subscriptions = [
                    data.subscribe(stream_owner_subject(self.me), self._answer),
                    data.subscribe(f"{self._answers}.*", self._answered),
                ]
            await data.barrier(timeout=STORE_TIMEOUT)
            self._is_ready = True

    async def _read_clock(self) -> None:
        info = await self._jetstream.stream_info(STREAM_LOGS, timeout=STORE_TIMEOUT)
        self._clock.set(info.now, monotonic())

    def server_time(self) -> float:
        """Unix seconds by the server's clock, which alone says how old a record is; known to who is
        ready, or reads."""
        return self._clock.unix(monotonic())

    # Logs --------------------------------------------------------------------------------------

    async def append(self, key: str, log: StreamLog, record: Record) -> None:
        """Store the next record of a log.

        Raises:
            WrongLastSequence: somebody else has written.
            DynbusError: it could not be stored, or nobody knows.
        """
        data = log.encode(record)
        # A log begins in the place of one that is over, if any.
        rolls_up = isinstance(record, Begun | Over)
        try:
            sequence = await self._publish(key, log, data, rolls_up=rolls_up)
        except NoStream:
            # The server was started again, or is about to elect a leader.
            self._is_ready = False
            if log.sequence:
                raise
            await self.make_ready()
            sequence = await self._publish(key, log, data, rolls_up=False)
        except WrongLastSequence:
            raise
        except DynbusError as error:
            sequence = await self._stored(key, log, data, error)
        log.wrote(record, len(data), sequence, self.server_time())
        self._stored_of[log.tenant] += log.size - self._sizes.get(key, 0)
        self._sizes[key] = log.size
        if isinstance(record, Over):
            self.uncount(key, log)
        elif isinstance(record, Begun | Owned):
            # It may have been paused here, or be of an id that is free again.
            self._ended.pop(key, None)

    def uncount(self, key: str, log: StreamLog) -> None:
        """A log is not this front end's any more, or holds nothing."""
        self._stored_of[log.tenant] -= self._sizes.pop(key, 0)
        if not self._stored_of[log.tenant]:
            del self._stored_of[log.tenant]

    async def make_room(self, tenant: str, size: int) -> bool:
        """Make room for so many bytes more of a tenant; False if there is none. Logs of this tenant
        alone are deleted for it, of which none goes on here, the oldest first.
        """
        # Without keys nobody shares with anybody.
        most = MOST_OF_TENANT if tenant else MOST_STORED
        while self._stored_of[tenant] + size > most:
            ended = next((key for key, one in self._ended.items() if one[0].tenant == tenant), None)
            if ended is None:
                return False
            log, *_ = self._ended.pop(ended)
            self.uncount(ended, log)
            await self.close_log(ended, log, "its tenant has more streams than are kept of one")
        return True

    async def _stored(self, key: str, log: StreamLog, data: bytes, error: DynbusError) -> int:
        """The number of a record of which the bus did not say in time whether it is stored: it may
        have, to a process that was frozen.

        Raises:
            WrongLastSequence: somebody else has written meanwhile.
            DynbusError: `error`, when it is not stored; or nobody knows.
        """
        last = await self.last(key)
        if last is None or last.sequence == log.sequence:
            raise error
        if last.data != data:
            raise WrongLastSequence(f"somebody else has written to the log {key}") from error
        return last.sequence

    async def _publish(self, key: str, log: StreamLog, data: bytes, *, rolls_up: bool) -> int:
        return await self._jetstream.publish(
            stream_log_subject(key),
            data,
            timeout=STORE_TIMEOUT,
            expected_last_subject_sequence=log.sequence,
            rollup=rolls_up,
        )

    async def bury(self, key: str, reason: str) -> bool:
        """Replace a log by the reason why it cannot be resumed, whichever process wrote last;
        whether that is done.

        For one whose owner no longer knows what is stored: its reader has been told more.
        """
        try:
            await self.make_ready()
            await self._jetstream.publish(
                stream_log_subject(key),
                StreamLog().encode(Over(reason)),
                timeout=STORE_TIMEOUT,
                rollup=True,
            )
        except NoStream:
            self._is_ready = False
            return False
        except DynbusError as error:
            logger.debug("the log %s stays as it is: %s", key, error)
            return False
        return True

    async def close_log(self, key: str, log: StreamLog, reason: str) -> None:
        """Replace a log by the reason why it cannot be resumed, as far as that can be."""
        try:
            await self.append(key, log, Over(reason))
        except DynbusError as error:
            logger.debug("the log %s stays as it is: %s", key, error)

    async def last(self, key: str) -> StoredMessage | None:
        """The last record of a log; None for none.

        Raises:
            DynbusError: it cannot be read.
        """
        subject = stream_log_subject(key)
        try:
            return await self._jetstream.last(STREAM_LOGS, subject, timeout=STORE_TIMEOUT)
        except NoStream:
            return None

    async def _newest(self, key: str) -> int:
        """The number of the last record of a log that was confirmed to anybody; 0 for none.

        Of a cluster a server may answer that has not carried out yet what was stored at others,
        also as its leader; but not after it has stored something itself.

        Raises:
            DynbusError: nobody knows.
        """
        await self._jetstream.publish(STREAM_LOGS_MARK, b"", timeout=STORE_TIMEOUT, rollup=True)
        last = await self.last(key)
        return 0 if last is None else last.sequence

    def ended(self, key: str, log: StreamLog, reason: str) -> None:
        """A stream is at its end, or paused: its log stays for those who have not read it to there.

        Args:
            reason: why it cannot be resumed when its time is over.
        """
        self._ended[key] = log, monotonic() + KEPT_SECONDS, reason

    async def sweep(self) -> None:
        """Drop logs when their time is over, without end."""
        while True:
            await anyio.sleep(SWEEP_INTERVAL)
            now = monotonic()
            for key, (log, until, reason) in list(self._ended.items()):
                # Room may have been made of it meanwhile, or somebody goes on with it.
                if now >= until and key in self._ended:
                    del self._ended[key]
                    self.uncount(key, log)
                    await self.close_log(key, log, reason)

    @asynccontextmanager
    async def reading(
        self,
        key: str,
        take: Callable[[StoredMessage], None],
        caught_up: Callable[[], None],
        lost: Callable[[], None],
    ) -> AsyncGenerator[None]:
        """Read a log from its beginning, and what is written to it.

        Args:
            caught_up: called when all that it held at the beginning was read.
            lost: called when all logs were lost meanwhile.

        Raises:
            Unavailable, PermissionDenied: it cannot be read.
        """
        try:
            await self._read_clock()
            consumer = await self._jetstream.consume(
                STREAM_LOGS,
                take,
                subject=stream_log_subject(key),
                start_sequence=1,
                at_least=await self._newest(key),
                on_caught_up=caught_up,
                on_recreated=lost,
            )
        except (PermissionDenied, Unavailable):
            raise
        except DynbusError as error:
            # Its servers may be about to elect a leader, or one of them about to be there again.
            self._is_ready = False
            raise Unavailable(
                f"the log of the stream cannot be read at present ({error}): ask again",
                started=False,
            ) from error
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await consumer.stop()

    # Owners ------------------------------------------------------------------------------------

    def ask(self, key: str, owner: str, watch: OwnerWatch) -> None:
        """Ask an owner whether it goes on with a stream; the watch is told what it says."""
        watch.ask(monotonic())
        if owner == self.me:
            watch.answered(owns=self._owns(key))
            return
        self.forget(watch)
        self._asked += 1
        number = watch.question = str(self._asked)
        self._watches[number] = watch
        self._bus.data.publish(
            stream_owner_subject(owner), key.encode(), reply=f"{self._answers}.{number}"
        )

    def forget(self, watch: OwnerWatch) -> None:
        """Tell a watch nothing more."""
        self._watches.pop(watch.question, None)
        watch.question = ""

    def _answer(self, message: Message) -> None:
        if self._bus.may_answer(message):
            owns = self._owns(message.data[:64].decode("ascii", "replace"))
            self._bus.data.publish(message.reply, YES if owns else NO)

    def _answered(self, message: Message) -> None:
        watch = self._watches.pop(message.subject.rpartition(".")[2], None)
        if watch is None:
            return
        watch.question = ""
        if message.found_nobody:
            watch.bounced()
        else:
            watch.answered(owns=message.data == YES)


def stream_grants() -> list[Grant]:
    """The uses that a front end makes of the bus, for `dynbus auth`, whose streams are resumed."""
    logs, owners = stream_log_subject("*"), stream_owner_subject("*")
    published = (logs, owners, *LOGS_STREAM.to_follow, "_R.>")
    return [Grant("keeps resumable streams", published, (owners,))]
