"""Records that their server keeps beyond their time, and their removal.

A nats-server that is killed may bring back messages whose TTL was over, and keeps some of them for
ever (2.15.1). Readers of records skip them. They are removed here: each kill would leave some.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import Final

import anyio

from dynbus.bus.errors import DynbusError, PermissionDenied
from dynbus.bus.protocol.random_ids import jitter
from dynbus.bus.transport import JetStream, OrderedConsumer, StoredMessage

logger = logging.getLogger(__name__)

BEYOND: Final = 60.0
"""Seconds beyond its TTL after which a stored message is one that its server forgot."""

REMOVED_AFTER: Final = (BEYOND + 15.0, BEYOND + 45.0)
"""Seconds between a reading and the removal: what had expired then is beyond its time by now, where
the server has not removed it itself; and of many readers one should be the first."""


def beyond_their_time(messages: Sequence[StoredMessage]) -> list[StoredMessage]:
    """Those that should have expired long ago when the newest was stored: all times are the
    server's."""
    newest = max((message.time for message in messages), default=0.0)
    return [message for message in messages if newest > _end(message) + BEYOND]


def _end(message: StoredMessage) -> float:
    """The time when a message expires, in Unix seconds of its server."""
    ttl = message.ttl
    return math.inf if ttl is None else message.time + ttl


class ExpiredRecords:
    """The records of a bucket that have expired, found by a reader and removed when they stay.

    Args:
        stream: of the bucket; its subjects keep their last message alone.
    """

    def __init__(self, jetstream: JetStream, stream: str) -> None:
        self._jetstream = jetstream
        self._stream = stream
        self._expiring = asyncio.Event()
        # Of what was read since the beginning: when the newest was stored, and the first expires.
        self._newest, self._first_end = 0.0, math.inf

    def __repr__(self) -> str:
        state = "some" if self._expiring.is_set() else "none"
        return f"<ExpiredRecords of {self._stream} [{state}]>"

    async def consume(
        self,
        on_message: Callable[[StoredMessage], None],
        *,
        on_restart: Callable[[], None],
        on_caught_up: Callable[[], None],
    ) -> OrderedConsumer:
        """Read the last message of each subject and what follows; see `JetStream.consume`.

        Raises:
            NoStream: there is no such bucket.
        """

        def begin() -> None:
            self._newest, self._first_end = 0.0, math.inf

        def note(message: StoredMessage) -> None:
            self._newest = max(self._newest, message.time)
            self._first_end = min(self._first_end, _end(message))
            on_message(message)

        def restart() -> None:
            begin()
            on_restart()

        def caught_up() -> None:
            if self._newest > self._first_end:
                self._expiring.set()
            on_caught_up()

        begin()
        return await self._jetstream.consume(
            self._stream,
            note,
            last_per_subject=True,
            on_restart=restart,
            on_caught_up=caught_up,
        )

    async def remove(self) -> None:
        """Remove what is found, without end, or until that turns out not to be allowed."""
        while True:
            await self._expiring.wait()
            await anyio.sleep(jitter.uniform(*REMOVED_AFTER))
            self._expiring.clear()
            try:
                await self._remove()
            except PermissionDenied as error:
                logger.info("expired records stay in %s: %s", self._stream, error)
                return
            except DynbusError as error:
                logger.debug("expired records stay in %s for now: %s", self._stream, error)

    async def _remove(self) -> None:
        expired = beyond_their_time(await self._jetstream.read(self._stream))
        for message in expired:
            # Whatever was written under the name meanwhile has a later sequence.
            await self._jetstream.purge(self._stream, message.subject, up_to=message.sequence)
        if expired:
            logger.info(
                "%d records were removed from %s that its server had kept beyond their time",
                len(expired),
                self._stream,
            )
