"""Routers tell each other what they send where, over core NATS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Final

from dynbus.bus.cleanup import end_tasks, finish
from dynbus.bus.clock import monotonic
from dynbus.bus.protocol.names import check_token, kv_load_subject
from dynbus.bus.transport import Connection, Message, Subscription

from .shared_load import SharedLoad

logger = logging.getLogger(__name__)

BATCH_TIME: Final = 0.001
"""Seconds in which changes are gathered for one message."""

HEARTBEAT: Final = 0.5


class LoadSharing:
    """Shares the load of one component with its other routers, while in the `async with`.

    Args:
        connection: of the running loop.
        changed: called when other routers' requests ended, so that waiting ones may go on.

    Raises:
        ConfigError: namespace, component or the router's id is no token of a subject.
    """

    def __init__(
        self,
        connection: Connection,
        namespace: str,
        component: str,
        load: SharedLoad,
        changed: Callable[[], None],
    ) -> None:
        self.load = load
        self.dropped = 0
        self._connection = connection
        check_token("namespace", namespace)
        check_token("component", component)
        self._subject = kv_load_subject(namespace, component, check_token("router", load.router))
        self._subjects = kv_load_subject(namespace, component, "*")
        self._changed = changed
        self._subscription: Subscription | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<LoadSharing {self._subject} [{len(self.load.routers())} other routers]>"

    async def __aenter__(self) -> LoadSharing:
        self._subscription = self._connection.subscribe(self._subjects, self._receive)
        try:
            # Whoever is asked answers at once, and must be heard.
            await self._connection.barrier()
        except BaseException:
            self._subscription.unsubscribe()
            raise
        self._publish()
        self._beat = asyncio.create_task(self._live(), name=f"load of {self._subject}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await finish(self._close())

    def notify(self) -> None:
        """Something happened to own requests: it is said within `BATCH_TIME`."""
        if self._flush is None and self._beat is not None:
            self._flush = asyncio.get_running_loop().call_later(BATCH_TIME, self._publish)

    async def _close(self) -> None:
        beat, self._beat = self._beat, None
        if beat is not None:
            await end_tasks(beat)
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if self._subscription is not None:
            self._subscription.unsubscribe()
            self._connection.publish(self._subject, self.load.farewell())

    async def _live(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT)
            try:
                if self.load.expire(monotonic()):
                    self._changed()
                self._publish(alive=True)
            except Exception:
                # Without signs of life the others would forget what runs of this router.
                logger.exception("%r: the load was not told", self)

    def _publish(self, *, alive: bool = False) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        for message in self.load.outgoing(monotonic(), alive=alive):
            self._connection.publish(self._subject, message)

    def _receive(self, message: Message) -> None:
        try:
            sender = message.subject.split(".")[3]
            changed = self.load.receive(message.data, monotonic(), sender=sender)
        except ValueError as error:
            self.dropped += 1
            logger.warning("a message on %s was dropped: %s", message.subject, error)
            return
        if changed:
            self._changed()
        if self.load.has_outgoing or self.load.needs_answer:
            self.notify()
