"""`PullReader` over nats-server.

A pull is a request for some messages that the server answers one by one, or with a status when it
is over. It may be lost without a word: with its session, with the server, with a leader of a
cluster. So each has heartbeats, and what has not come is asked for again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import Final

import anyio
import msgspec

from dynbus.bus.clock import monotonic
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import DynbusError
from dynbus.bus.protocol import headers as header_block
from dynbus.bus.transport import ConnectionState, Delivery, Message, Subscription

from .api_requests import ServerLink
from .consumer import ack_position, stored_message

logger = logging.getLogger(__name__)

PULL_EXPIRES: Final = 30.0
PULL_HEARTBEAT: Final = 2.0
MISSED_HEARTBEATS: Final = 3
FIRST_RETRY: Final = 0.05
MAX_RETRY: Final = 2.0

_NANOSECONDS: Final = 1_000_000_000
_EXPIRED: Final = "408"


class _Pull:
    """A request for messages, and the inbox that they come to.

    Attributes:
        remaining: messages that it may still bring.
        heard: when the server last said something of it.
    """

    __slots__ = ("heard", "inbox", "remaining", "subscription")

    def __init__(self, inbox: str) -> None:
        self.inbox = inbox
        self.remaining = 0
        self.heard = 0.0
        self.subscription: Subscription | None = None

    def close(self) -> None:
        if self.subscription is not None:
            self.subscription.unsubscribe()


class NatsPullReader:
    """Asks for messages until they come."""

    def __init__(
        self,
        connection: ServerLink,
        stream: str,
        consumer: str,
        on_delivery: Callable[[Delivery], None],
        on_missing: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._on_delivery = on_delivery
        self._on_missing = on_missing
        self._wanted = 0
        self._pulls: list[_Pull] = []
        # They have brought all that they were to bring, so that nothing of them can come later.
        self._done: list[_Pull] = []
        self._is_pulling = False
        self._is_waiting = False
        self._stopped = False
        self._retry = FIRST_RETRY
        self._wake = asyncio.Event()
        self._stop_listening = connection.on_state(self._on_state)
        self._work = connection.background.start(self._watch, name=f"pull {stream}")

    def __repr__(self) -> str:
        return f"<NatsPullReader {self._stream} [wanted: {self._wanted}]>"

    @property
    def wanted(self) -> int:
        return self._wanted

    def ask(self, count: int) -> None:
        self._wanted += count
        # What a turn of the loop asks for is one request.
        if not self._is_pulling:
            self._is_pulling = True
            self._connection.before_sending(self._pull)

    async def withdraw(self) -> None:
        pulls, self._pulls = self._pulls, []
        self._wanted = 0
        async with anyio.create_task_group() as tasks:
            for pull in pulls:
                if pull.subscription is not None:
                    tasks.start_soon(pull.subscription.drain)

    async def stop(self) -> None:
        self._stopped = True
        self._stop_listening()
        await self._work.end()
        await self.withdraw()
        for pull in self._done:
            pull.close()

    def _pull(self) -> None:
        """Ask for what no pull is to bring."""
        self._is_pulling = False
        count = self._wanted - sum(pull.remaining for pull in self._pulls)
        if (
            count <= 0
            or self._stopped
            or self._is_waiting
            or self._connection.state is not ConnectionState.CONNECTED
        ):
            return
        pull = self._done.pop() if self._done else self._new_pull()
        pull.remaining = count
        pull.heard = monotonic()
        self._pulls.append(pull)
        request = {
            "batch": count,
            "expires": int(PULL_EXPIRES * _NANOSECONDS),
            "idle_heartbeat": int(PULL_HEARTBEAT * _NANOSECONDS),
        }
        self._connection.publish(self._subject, msgspec.json.encode(request), reply=pull.inbox)

    def _new_pull(self) -> _Pull:
        # No inbox has two pulls at a time: what the one still brings is not mistaken for another's.
        pull = _Pull(f"{self._connection.inbox}w.{secrets.token_hex(8)}")
        pull.subscription = self._connection.subscribe(
            pull.inbox, partial(self._receive, pull), reads_stream=True
        )
        return pull

    def _close(self, pull: _Pull) -> None:
        pull.close()
        if pull in self._pulls:
            self._pulls.remove(pull)

    def _receive(self, pull: _Pull, message: Message) -> None:
        pull.heard = monotonic()
        if message.headers and (status := header_block.status(message.headers)):
            self._note_status(pull, status, message.headers)
            return
        position = ack_position(message.reply)
        if position is None:
            self._connection.drop(DropReason.MALFORMED)
            return
        self._retry = FIRST_RETRY
        # One that was withdrawn brings what nobody waits for.
        if pull in self._pulls:
            self._wanted -= 1
            pull.remaining -= 1
            if pull.remaining <= 0:
                self._pulls.remove(pull)
                self._done.append(pull)
        self._on_delivery(
            Delivery(stored_message(message, position), position.tries, message.reply)
        )

    def _note_status(self, pull: _Pull, status: str, block: bytes) -> None:
        if status == "100":
            return
        self._close(pull)
        if status == _EXPIRED:
            self._retry = FIRST_RETRY
            self._pull()
            return
        logger.debug("%r: a pull ended: %s", self, block[: block.find(b"\r\n")])
        # A leader that is being elected, a consumer that is gone, too many that ask.
        self._is_waiting = True
        self._wake.set()
        if status == header_block.NO_RESPONDERS or b"Deleted" in block:
            self._on_missing()

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            # The pulls of the session before are over; their inboxes are given up with them.
            for pull in list(self._pulls):
                self._close(pull)
            self._pull()

    async def _watch(self) -> None:
        while True:
            with anyio.move_on_after(PULL_HEARTBEAT):
                await self._wake.wait()
            self._wake.clear()
            if self._is_waiting:
                await anyio.sleep(self._retry)
                self._retry = min(2 * self._retry, MAX_RETRY)
                self._is_waiting = False
            elif self._silent():
                await self._give_up_silent()
            self._pull()

    def _silent(self) -> list[_Pull]:
        since = monotonic() - PULL_HEARTBEAT * MISSED_HEARTBEATS
        return [pull for pull in self._pulls if pull.heard < since]

    async def _give_up_silent(self) -> None:
        if self._connection.state is not ConnectionState.CONNECTED:
            return
        try:
            # We may have been frozen ourselves: what the server has said is read first.
            await self._connection.barrier()
        except DynbusError as error:
            logger.debug("%r: the server is silent: %s", self, error)
            return
        for pull in self._silent():
            logger.info("%r: a pull of %s is lost and asked for again", self, self._stream)
            self._close(pull)
