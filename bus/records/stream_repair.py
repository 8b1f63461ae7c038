"""Making a stream again whose store takes nothing any more.

After a full disk nats-server answers no write to a stream, also when there is space again, until
the stream is made again or the server is restarted. Whoever can say again what the stream held
need not wait for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from dynbus.bus.errors import PermissionDenied
from dynbus.bus.protocol.tokens import jitter
from dynbus.bus.transport import JetStream, NoStream

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT: Final = 2.0
SPREAD: Final = 0.5
"""Seconds; of all who find the stream broken at once one should make it again, not each."""


class StreamRepair:
    """Looks at one stream, and makes it again where that mends it.

    Args:
        make: makes the stream when it does not exist, where it can be written.
    """

    def __init__(
        self, jetstream: JetStream, stream: str, make: Callable[[], Awaitable[None]]
    ) -> None:
        self._jetstream = jetstream
        self._stream = stream
        self._make = make
        self._refused = False
        self._replicas = 1

    def __repr__(self) -> str:
        return f"<StreamRepair {self._stream}>"

    def note_replicas(self, replicas: int) -> None:
        """Know how many servers keep the stream, so that those of several need not be asked."""
        self._replicas = replicas

    async def look(self) -> bool:
        """Make the stream again if its store is broken; whether it is another one than before.

        A stream with replicas is left alone: its other servers go on without the broken one, and
        may be electing a leader just now.

        Raises:
            DynbusError: the server does not answer, or refuses.
        """
        if self._refused or self._replicas > 1:
            return False
        try:
            return await self._look()
        except NoStream:
            await self._make()
            return True
        except PermissionDenied as error:
            self._refused = True
            logger.warning(
                "stream %s takes no writes, and whether it must be made again is not for us to "
                "see (%s): restart its server if its disk was full, or allow us to purge and "
                "delete it",
                self._stream,
                error,
            )
            return False

    async def _look(self) -> bool:
        found = await self._jetstream.stream_info(self._stream, timeout=ANSWER_TIMEOUT)
        if found.replicas > 1:
            return False
        why = await self._jetstream.write_error(self._stream, timeout=ANSWER_TIMEOUT)
        if not why:
            return False
        await asyncio.sleep(jitter.uniform(0.0, SPREAD))
        again = await self._jetstream.stream_info(self._stream, timeout=ANSWER_TIMEOUT)
        if again.created == found.created:
            await self._jetstream.delete_stream(self._stream, timeout=ANSWER_TIMEOUT)
            logger.warning("stream %s took no writes and is made again: %s", self._stream, why)
        await self._make()
        return True
