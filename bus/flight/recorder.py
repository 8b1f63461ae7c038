"""`FlightRecorder`: sends what a process records, a message a quarter of a second.

Nothing waits for it. What it cannot send is missing from the flight, and the numbers of its records
say so.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from dynbus.bus.background import Background
from dynbus.bus.clock import monotonic, unix_time
from dynbus.bus.errors import DynbusError, PayloadTooLarge, PermissionDenied
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.transport import Connection, NoRoom

from .records import Event, Record, encode_records, flight_stream, flight_subject
from .sampling import CALM, SAMPLED, WINDOW, Sampling

logger = logging.getLogger(__name__)

INTERVAL: Final = 0.25
"""Seconds in which records are gathered for one message."""
MOST_RECORDS: Final = 10_000
"""Records that are gathered; further ones are lost."""
PER_MESSAGE: Final = 500
"""Records of a message: many are encoded without holding up the loop for long."""
MOST_BACKLOG: Final = 1024**2
"""Bytes that wait for the server, beyond which records are lost: what they are about goes first."""
TELL_AFTER: Final = 60.0
"""Seconds after which it is told again that a share of the requests is recorded: what is read from
the middle on is understood soon."""
TRY_AGAIN: Final = 10.0
"""Seconds until the stream is made again that could not be made."""


class FlightRecorder:
    """Records what one part of a process does in a namespace. Belongs to the running loop.

    Args:
        background: makes the stream.
        sampling: of its process, which says what requests are recorded.

    Attributes:
        id: drawn, of its records.
        lost: records that were not sent.
    """

    def __init__(
        self, connection: Connection, background: Background, namespace: str, sampling: Sampling
    ) -> None:
        self.id = random_id()
        self.lost = 0
        self._connection = connection
        self._stream = flight_stream(namespace)
        self._subject = flight_subject(namespace, self.id)
        self._loop = asyncio.get_running_loop()
        self._records: list[tuple[float, Record]] = []
        # The number of the first that is gathered; those behind it were gathered without a gap.
        self._first = 0
        # Those that have been counted; the others are new.
        self._counted = 0
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._sampling = sampling
        self._told_one_in, self._tell_at = 1, 0.0
        # None until the stream is there, or is known not to come.
        self._is_on: bool | None = None
        background.start(self._make_stream, name=f"the stream {self._stream.name}")

    def __repr__(self) -> str:
        return f"<FlightRecorder {self._stream.name} [{self._first} records, {self.lost} lost]>"

    @property
    def is_ready(self) -> bool:
        """True if there is a stream."""
        return bool(self._is_on)

    def share(self, digest: int) -> int:
        """See `Sampling.share`."""
        return self._sampling.share(digest)

    def note(self, record: Record, at: float) -> None:
        """Record something that happened at a time of the monotonic clock."""
        if self._is_on is False:
            self.lost += 1
            return
        if len(self._records) >= MOST_RECORDS:
            # Which of them are lost makes no difference, and so the gap is one.
            self._lose()
        self._records.append((at, record))
        if self._timer is None:
            self._timer = self._loop.call_later(INTERVAL, self._send)

    def close(self) -> None:
        """Send what is gathered, also where it is not known yet that there is a stream."""
        for timer in (self._timer, self._look):
            if timer is not None:
                timer.cancel()
        self._timer = self._look = None
        while self._records:
            self._send_some()

    def _send(self) -> None:
        self._timer = None
        self._count()
        if self._is_on is not None:
            self._send_some()
        if self._records:
            # Many are sent turn by turn.
            wait = INTERVAL if self._is_on is None else 0.0
            self._timer = self._loop.call_later(wait, self._send)
        if self._sampling.one_in > 1 and self._look is None:
            self._look = self._loop.call_later(CALM * WINDOW, self._look_again)

    def _look_again(self) -> None:
        """See whether more requests may be recorded, though nothing is."""
        self._look = None
        if self._timer is None:
            self._send()

    def _count(self) -> None:
        """Have what was gathered since it was last counted decide on the share, and tell that."""
        now, sampling = monotonic(), self._sampling
        made = self._first + len(self._records)
        sampling.count(made - self._counted, now)
        one_in = sampling.one_in
        if one_in != self._told_one_in or (one_in > 1 and now >= self._tell_at):
            self._told_one_in, self._tell_at = one_in, now + TELL_AFTER
            self._records.append((now, Event(SAMPLED, self.id, "", {"one_in": one_in})))
            made += 1
        self._counted = made

    def _send_some(self) -> None:
        """Send the first records, or lose all where there is no way."""
        connection = self._connection
        is_off = self._is_on is False
        if is_off or not connection.is_connected or connection.backlog > MOST_BACKLOG:
            self._lose()
            return
        some, self._records = self._records[:PER_MESSAGE], self._records[PER_MESSAGE:]
        first = self._first
        self._first += len(some)
        self._publish(first, some)

    def _publish(self, first: int, records: list[tuple[float, Record]]) -> None:
        """Send records, in several messages where one would be too large; what no message can have
        is lost, and what came with it is not."""
        try:
            data = encode_records(self.id, first, unix_time() - monotonic(), records)
            self._connection.publish(self._subject, data)
        except (PayloadTooLarge, UnicodeEncodeError, OverflowError) as error:
            if len(records) > 1:
                half = len(records) // 2
                self._publish(first, records[:half])
                self._publish(first + half, records[half:])
                return
            self.lost += 1
            logger.debug("%r: %s", self, error)
        except DynbusError as error:
            self.lost += len(records)
            logger.debug("%r: %s", self, error)

    def _lose(self) -> None:
        if any(isinstance(one, Event) and one.what == SAMPLED for _, one in self._records):
            # It is told once more.
            self._told_one_in = 0
        self._first += len(self._records)
        self.lost += len(self._records)
        self._records = []

    async def _make_stream(self) -> None:
        logged = ""
        while True:
            try:
                await self._connection.jetstream.ensure_stream(self._stream, probe=self._subject)
            except (PermissionDenied, NoRoom) as error:
                logger.warning(
                    "nothing is recorded: %s; an operator makes the stream: `dynbus setup`", error
                )
                self._is_on = False
                return
            except DynbusError as error:
                level = logging.DEBUG if str(error) == logged else logging.WARNING
                logged = str(error)
                logger.log(level, "nothing is recorded yet: %s", error)
                await asyncio.sleep(TRY_AGAIN)
            else:
                self._is_on = True
                return
