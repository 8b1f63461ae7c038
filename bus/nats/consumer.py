"""`OrderedConsumer` over nats-server.

It notices gaps, silence and reconnects by itself and starts over, and it notices that its
stream is another one than before. The server delivers to any listener, so a consumer that
was made listens only after it is known to be of the right stream.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import anyio

from dynbus.bus.background import Work
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import DynbusError, Unavailable
from dynbus.bus.protocol import headers as header_block
from dynbus.bus.transport import (
    ConnectionState,
    ConsumeOptions,
    Message,
    StoredMessage,
    Subscription,
)

from .answers import is_answer, written
from .api_requests import ServerLink, call_jetstream

logger = logging.getLogger(__name__)

IDLE_HEARTBEAT: Final = 1.0
MISSED_HEARTBEATS: Final = 3
INACTIVE_THRESHOLD: Final = 5.0
RESTART_DELAY: Final = 0.25
MAX_RESTART_DELAY: Final = 2.0
START_TIMEOUT: Final = 5.0

_NANOSECONDS = 1_000_000_000


class NatsOrderedConsumer:
    """Reads a stream without acknowledgements and starts over whenever in doubt."""

    def __init__(
        self,
        connection: ServerLink,
        stream: str,
        on_message: Callable[[StoredMessage], None],
        options: ConsumeOptions,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._on_message = on_message
        self._subject = options.get("subject") or ">"
        self._next_sequence = max(1, options.get("start_sequence", 1))
        self._last_per_subject = options.get("last_per_subject", False)
        self._created = options.get("created")
        self._at_least = options.get("at_least", 0)
        self._on_restart = options.get("on_restart")
        self._on_recreated = options.get("on_recreated")
        self._on_caught_up = options.get("on_caught_up")
        # The last messages of an instance are its whole state, whichever stream they are of.
        self._minds_the_stream = (
            not self._last_per_subject
            or self._created is not None
            or self._on_recreated is not None
        )
        self._caught_up = False
        self._subscription: Subscription | None = None
        self._consumer = ""
        self._delivered: int = 0
        self._heard = 0.0
        self._wake = asyncio.Event()
        self._work: Work | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<NatsOrderedConsumer {self._stream} [next: {self._next_sequence}]>"

    async def start(self) -> None:
        """Create the consumer and begin delivery.

        Raises:
            NoStream: the stream does not exist.
            Unavailable: the server does not answer.
        """
        await self._create(first=True)
        self._stop_listening = self._connection.on_state(self._on_state)
        self._work = self._connection.background.start(self._watch, name=f"consume {self._stream}")

    async def stop(self) -> None:
        if self._work is not None:
            await self._work.end()
        if self._stop_listening is not None:
            self._stop_listening()
        self._drop_subscription()
        if self._consumer and self._connection.state is ConnectionState.CONNECTED:
            name, self._consumer = self._consumer, ""
            call = f"CONSUMER.DELETE.{self._stream}.{name}"
            try:
                await call_jetstream(self._connection, call, {}, timeout=1.0)
            except DynbusError as error:
                # The server forgets an idle ephemeral consumer by itself after 5 s.
                logger.debug("consumer %s was not deleted: %s", name, error)

    def _drop_subscription(self) -> None:
        if self._subscription is not None:
            self._subscription.unsubscribe()
            self._subscription = None

    async def _create(self, *, first: bool) -> None:
        self._drop_subscription()
        before = await self._stream_created()
        recreated = self._created is not None and before != self._created
        if recreated:
            self._next_sequence = 1
            self._at_least = 0
        # A new inbox per try: what an earlier consumer still delivers cannot be mistaken.
        token = secrets.token_hex(8)
        inbox = f"{self._connection.inbox}c.{token}"
        call = f"CONSUMER.CREATE.{self._stream}.{token}.{self._subject}"
        request = {"stream_name": self._stream, "config": self._config(token, inbox)}
        answer = await call_jetstream(self._connection, call, request, timeout=START_TIMEOUT)
        if await self._stream_created() != before:
            raise Unavailable(f"stream {self._stream} was made again while it was looked at")
        self._created = before
        self._consumer = token
        self._delivered = 0
        self._caught_up = False
        self._heard = self._loop.time()
        if recreated:
            self._call(self._on_recreated)
        if self._last_per_subject and not first:
            self._call(self._on_restart)
        self._subscription = self._connection.subscribe(inbox, self._receive, reads_stream=True)
        if not answer.get("num_pending"):
            self._note_caught_up()

    async def _stream_created(self) -> float | None:
        if not self._minds_the_stream:
            return None
        jetstream = self._connection.jetstream
        return (await jetstream.stream_info(self._stream, timeout=START_TIMEOUT)).created

    def _config(self, name: str, inbox: str) -> dict[str, Any]:
        config: dict[str, Any] = {
            "name": name,
            "deliver_subject": inbox,
            "filter_subject": self._subject,
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "flow_control": True,
            "idle_heartbeat": int(IDLE_HEARTBEAT * _NANOSECONDS),
            "inactive_threshold": int(INACTIVE_THRESHOLD * _NANOSECONDS),
            "mem_storage": True,
            "num_replicas": 1,
        }
        if self._last_per_subject:
            config["deliver_policy"] = "last_per_subject"
        else:
            config["deliver_policy"] = "by_start_sequence"
            config["opt_start_seq"] = self._next_sequence
        return config

    async def _watch(self) -> None:
        delay = RESTART_DELAY
        while True:
            with anyio.move_on_after(IDLE_HEARTBEAT) as waiting:
                await self._wake.wait()
            silent = self._loop.time() - self._heard
            if waiting.cancelled_caught and silent < IDLE_HEARTBEAT * MISSED_HEARTBEATS:
                continue
            self._wake.clear()
            if self._connection.state is not ConnectionState.CONNECTED:
                continue
            try:
                await self._create(first=False)
                delay = RESTART_DELAY
            except DynbusError as error:
                logger.debug("consumer of %s not restarted: %s", self._stream, error)
                await anyio.sleep(delay)
                delay = min(2 * delay, MAX_RESTART_DELAY)
                self._wake.set()

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            self._wake.set()

    def _receive(self, message: Message) -> None:
        self._heard = self._loop.time()
        if header_block.status(message.headers) == "100":
            if message.reply:
                self._connection.publish(message.reply, b"")
                return
            self._idle(header_block.decode(message.headers))
            return
        position = ack_position(message.reply)
        if position is None:
            self._connection.drop(DropReason.MALFORMED)
            return
        if position.consumer_sequence != self._delivered + 1:
            self._wake.set()
            return
        self._delivered = position.consumer_sequence
        self._next_sequence = position.stream_sequence + 1
        self._on_message(stored_message(message, position))
        if position.pending == 0:
            self._note_caught_up()

    def _idle(self, heartbeat: Mapping[str, str]) -> None:
        last = heartbeat.get("Nats-Last-Consumer", "")
        stalled = heartbeat.get("Nats-Consumer-Stalled", "")
        if last.isdecimal() and int(last) > self._delivered:
            self._wake.set()
        elif stalled.startswith("$JS.FC."):
            self._connection.publish(stalled, b"")
        elif last.isdecimal():
            # What was still to come when the last message was delivered may be gone since.
            self._note_caught_up()
            if not self._caught_up:
                # A server that has to fetch what it missed may take longer than another one.
                self._wake.set()

    def _note_caught_up(self) -> None:
        if not self._caught_up and self._next_sequence > self._at_least:
            self._caught_up = True
            self._call(self._on_caught_up)

    def _call(self, callback: Callable[[], None] | None) -> None:
        """Run a callback; what it raises must not end the watch over the consumer."""
        if callback is None:
            return
        try:
            callback()
        except Exception:
            logger.exception("a callback of the consumer of %s raised", self._stream)


class AckPosition(NamedTuple):
    """The facts of a delivery that its ack subject has.

    Attributes:
        tries: how often the message was delivered.
        nanoseconds: Unix time at which it was stored.
        pending: messages behind it.
    """

    tries: int
    stream_sequence: int
    consumer_sequence: int
    nanoseconds: int
    pending: int


def ack_position(reply: str) -> AckPosition | None:
    """The position that an ack subject says; None for any other subject."""
    tokens = reply.split(".")
    if tokens[:2] != ["$JS", "ACK"] or len(tokens) not in (9, 11, 12):
        return None
    numbers = tokens[4:9] if len(tokens) == 9 else tokens[6:11]
    if not all(map(str.isdecimal, numbers)):
        return None
    return AckPosition(*map(int, numbers))


def stored_message(message: Message, position: AckPosition) -> StoredMessage:
    """A message of a stream as a consumer delivers it; see `written`."""
    fields, data = written(
        header_block.decode(message.headers),
        message.data,
        is_answer=is_answer(message.headers, message.data),
    )
    return StoredMessage(
        message.subject,
        position.stream_sequence,
        position.nanoseconds / _NANOSECONDS,
        fields,
        data,
        position.pending,
    )
