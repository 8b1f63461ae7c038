"""Pull consumers without a server: who gets which message of a work queue, and when again.

`MemoryPullConsumer` is the server's part of one, `MemoryPullReader` that of a connection.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from dynbus.bus.errors import Unavailable
from dynbus.bus.transport import (
    AckKind,
    ConnectionState,
    ConsumerInfo,
    Delivery,
    PullConsumerConfig,
)

from .stream import MemoryStream


class ReaderLink(Protocol):
    """The connection of a reader."""

    @property
    def state(self) -> ConnectionState: ...
    def send(self, command: Callable[[], None], size: int = 0) -> None: ...
    def deliver(self, delivery: Callable[[], None]) -> None: ...
    def call(self, callback: Callable[[], None], what: str) -> None: ...
    async def barrier(self, *, timeout: float = 5.0) -> None: ...


class Demand(Protocol):
    """The subject at which a reader asks for messages."""

    def want(self, reader: MemoryPullReader) -> None: ...
    def forget_reader(self, reader: MemoryPullReader) -> None: ...


class MemoryPullReader:
    """Has the server deliver as many messages as it was asked for."""

    def __init__(
        self,
        connection: ReaderLink,
        server: Demand,
        stream: str,
        consumer: str,
        on_delivery: Callable[[Delivery], None],
        on_missing: Callable[[], None],
    ) -> None:
        self.connection = connection
        self.stream = stream
        self.consumer = consumer
        self._server = server
        self._on_delivery = on_delivery
        self._on_missing = on_missing
        self._wanted = 0
        self._stopped = False

    def __repr__(self) -> str:
        return f"<MemoryPullReader {self.stream} [wanted: {self._wanted}]>"

    @property
    def wanted(self) -> int:
        return self._wanted

    def ask(self, count: int) -> None:
        self._wanted += count
        self.restart()

    def restart(self) -> None:
        """Tell the server what is wanted, in a later turn."""
        if self._wanted > 0 and not self._stopped:
            self.connection.send(partial(self._server.want, self))

    async def stop(self) -> None:
        self._stopped = True
        await self.withdraw()

    async def withdraw(self) -> None:
        self._wanted = 0
        self.connection.send(partial(self._server.forget_reader, self))
        # Without a session nothing is on its way.
        if self.connection.state is ConnectionState.CONNECTED:
            with suppress(Unavailable):
                await self.connection.barrier()

    def miss(self) -> None:
        """There is no such consumer; when it is made, the server starts the reader again."""
        self.connection.call(self._on_missing, self.stream)

    def receive(self, delivery: Delivery) -> None:
        """Take a delivery."""
        self._wanted = max(0, self._wanted - 1)
        self.connection.call(partial(self._on_delivery, delivery), self.stream)


class _Unsettled(NamedTuple):
    """A message that was delivered: when it is to be delivered again."""

    tries: int
    due: float


class MemoryPullConsumer:
    """One consumer of a stream. Times are loop seconds.

    Args:
        context: of the server, in which its timers run.
    """

    def __init__(
        self, config: PullConsumerConfig, stream: MemoryStream, context: contextvars.Context
    ) -> None:
        self.config = config
        self.stream = stream
        self._next_sequence = _start_of(config, stream)
        self._unsettled: dict[int, _Unsettled] = {}
        self._owed: dict[MemoryPullReader, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._context = context
        self._is_paused = False

    def __repr__(self) -> str:
        return f"<MemoryPullConsumer {self.stream.config.name} [unsettled: {len(self._unsettled)}]>"

    def info(self) -> ConsumerInfo:
        """The progress of its readers."""
        pending = len(self._after())
        return ConsumerInfo(
            pending,
            len(self._unsettled),
            self.config.ack_wait,
            self._next_sequence - 1,
            self.config.description,
        )

    def _after(self) -> list[int]:
        """The messages that were not delivered yet, oldest first."""
        patterns = self.config.subjects or (self.config.subject,)
        return sorted(
            {one for each in patterns for one in self.stream.after(self._next_sequence, each)}
        )

    def want(self, reader: MemoryPullReader) -> None:
        """Deliver to a reader what it wants, in turn with others."""
        self._owed[reader] = reader.wanted
        self.serve()

    def forget(self, reader: MemoryPullReader) -> None:
        """Deliver nothing more to a reader."""
        self._owed.pop(reader, None)

    def readers(self) -> list[MemoryPullReader]:
        """Those that wait for messages."""
        return list(self._owed)

    def serve(self) -> None:
        """Deliver what there is to those who want it."""
        if self._is_paused:
            return
        now = asyncio.get_running_loop().time()
        while self._owed:
            sequence = self._next(now)
            if sequence is None:
                break
            reader, owed = next(iter(self._owed.items()))
            del self._owed[reader]
            if owed > 1:
                # Behind all others: they take turns.
                self._owed[reader] = owed - 1
            self._deliver(reader, sequence, now)
        self._set_timer(now)

    def pause(self, paused: bool) -> None:
        """Deliver nothing, or deliver again."""
        self._is_paused = paused
        self.serve()

    def acknowledge(self, sequence: int, kind: AckKind, delay: float) -> None:
        """Carry out what a reader says of a message; one that is settled stays so."""
        known = self._unsettled.get(sequence)
        if known is None:
            return
        now = asyncio.get_running_loop().time()
        if kind in (AckKind.ACK, AckKind.TERM):
            del self._unsettled[sequence]
            if self.stream.config.work_queue:
                self.stream.drop(sequence)
        elif kind is AckKind.NAK:
            self._unsettled[sequence] = known._replace(due=now + delay)
        else:
            self._unsettled[sequence] = known._replace(due=now + self.config.ack_wait)
        self.serve()

    def close(self) -> None:
        """Do nothing more: the stream is gone."""
        if self._timer is not None:
            self._timer.cancel()
        self._owed.clear()

    def _next(self, now: float) -> int | None:
        """The message to be delivered next."""
        for sequence, unsettled in list(self._unsettled.items()):
            if not self.stream.holds(sequence):
                del self._unsettled[sequence]
            elif unsettled.due <= now:
                return sequence
        most = self.config.max_ack_pending
        if most is not None and len(self._unsettled) >= most:
            return None
        fresh = self._after()
        return fresh[0] if fresh else None

    def _deliver(self, reader: MemoryPullReader, sequence: int, now: float) -> None:
        before = self._unsettled.pop(sequence, None)
        tries = 1 if before is None else before.tries + 1
        self._unsettled[sequence] = _Unsettled(tries, now + self.config.ack_wait)
        self._next_sequence = max(self._next_sequence, sequence + 1)
        pending = len(self._after())
        message = self.stream.get(sequence)._replace(pending=pending)
        token = ack_subject(self.stream.config.name, self.config.name, sequence)
        delivery = Delivery(message, tries, token)
        reader.connection.deliver(partial(reader.receive, delivery))

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        dues = [unsettled.due for unsettled in self._unsettled.values() if unsettled.due > now]
        if dues and self._owed:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(min(dues), self.serve, context=self._context)


def _start_of(config: PullConsumerConfig, stream: MemoryStream) -> int:
    """The first sequence that a consumer may deliver."""
    if config.new_only:
        return stream.last_sequence + 1
    if config.start_time is not None:
        later = (one for one in stream.after(1, ">") if stream.get(one).time >= config.start_time)
        return next(later, stream.last_sequence + 1)
    return 1


def ack_subject(stream: str, consumer: str, sequence: int) -> str:
    """The subject at which a message is acknowledged."""
    return f"$JS.ACK.{stream}.{consumer}.{sequence}"
