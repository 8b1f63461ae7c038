"""`JetStream` over nats-server: its JSON API, spoken directly.

Requests go through `NatsConnection.request`, so they survive what the connection survives;
the ordered consumer notices gaps, silence and reconnects by itself and starts over.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from . import headers as header_block
from .errors import ConfigError, DynbusError, Unavailable
from .transport import (
    ConnectionState,
    Message,
    NoStream,
    StoredMessage,
    StreamConfig,
    WrongLastSequence,
)

if TYPE_CHECKING:
    from .nats_client import NatsConnection, NatsSubscription

logger = logging.getLogger(__name__)

IDLE_HEARTBEAT: Final = 1.0
MISSED_HEARTBEATS: Final = 3
RESTART_DELAY: Final = 0.25
MAX_RESTART_DELAY: Final = 2.0

_NANOSECONDS = 1_000_000_000
_WRONG_LAST_SEQUENCE = 10071
_WRONG_LAST_SEQUENCE_CONSTANT = 10164
_STREAM_NAME_IN_USE = 10058
_STREAM_NOT_FOUND = 10059
_MESSAGE_NOT_FOUND = 10037


class JetStreamError(DynbusError):
    """Raised when the server refuses a JetStream request for a reason not named otherwise.

    Attributes:
        error_code: the server's own number.
    """

    code = "JetStreamError"

    def __init__(self, message: str, error_code: int = 0) -> None:
        super().__init__(message)
        self.error_code = error_code


def _raise_for(error: Mapping[str, Any], what: str) -> None:
    code = int(error.get("err_code", 0))
    text = f"{what}: {error.get('description', 'refused')}"
    if code in (_WRONG_LAST_SEQUENCE, _WRONG_LAST_SEQUENCE_CONSTANT):
        last = text.rpartition(" ")[2]
        raise WrongLastSequence(text, int(last) if last.isdigit() else 0)
    if code == _STREAM_NOT_FOUND:
        raise NoStream(text)
    raise JetStreamError(text, code)


def stream_request(config: StreamConfig) -> dict[str, Any]:
    """The server's JSON for a stream."""
    limits = config.limits
    age = int(limits.max_age * _NANOSECONDS) if limits.max_age else 0
    window = int(limits.duplicate_window * _NANOSECONDS)
    request: dict[str, Any] = {
        "name": config.name,
        "subjects": list(config.subjects),
        "retention": "workqueue" if config.work_queue else "limits",
        "storage": "memory" if config.in_memory else "file",
        "num_replicas": config.replicas,
        "discard": "old",
        "max_bytes": limits.max_bytes or -1,
        "max_msgs": limits.max_messages or -1,
        "max_msgs_per_subject": limits.max_messages_per_subject or -1,
        "max_age": age,
        "max_consumers": -1,
        "max_msg_size": -1,
        "duplicate_window": min(window, age) if age else window,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "description": config.description,
    }
    if config.marker_ttl is not None:
        request["allow_msg_ttl"] = True
        request["subject_delete_marker_ttl"] = int(config.marker_ttl * _NANOSECONDS)
    return request


class NatsJetStream:
    """The JetStream API of the server that a connection reaches."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection

    async def api(self, call: str, request: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        """One call of `$JS.API`.

        Raises:
            NoStream, WrongLastSequence, JetStreamError: the server refuses.
            Unavailable: it does not answer, or has no JetStream.
        """
        data = msgspec.json.encode(request) if request else b""
        reply = await self._connection.request(f"$JS.API.{call}", data, timeout=timeout)
        answer = msgspec.json.decode(reply.data, type=dict[str, Any])
        if "error" in answer:
            _raise_for(answer["error"], call)
        return answer

    async def ensure_stream(self, config: StreamConfig, *, timeout: float = 5.0) -> None:
        try:
            await self.api(f"STREAM.CREATE.{config.name}", stream_request(config), timeout=timeout)
            return
        except JetStreamError as error:
            if error.error_code != _STREAM_NAME_IN_USE:
                raise
        info = await self.api(f"STREAM.INFO.{config.name}", {}, timeout=timeout)
        subjects = tuple(info["config"].get("subjects") or ())
        if subjects != config.subjects:
            raise ConfigError(
                f"stream {config.name} exists with subjects {', '.join(subjects)}; dynbus needs "
                f"{', '.join(config.subjects)}: delete or rename the other one"
            )

    async def delete_stream(self, name: str, *, timeout: float = 5.0) -> None:
        try:
            await self.api(f"STREAM.DELETE.{name}", {}, timeout=timeout)
        except NoStream:
            return

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        message_id: str = "",
        expected_last_subject_sequence: int | None = None,
        ttl: float | None = None,
        rollup: bool = False,
        headers: Mapping[str, str] | None = None,
        timeout: float = 5.0,
    ) -> int:
        fields = dict(headers or {})
        if message_id:
            fields["Nats-Msg-Id"] = message_id
        if expected_last_subject_sequence is not None:
            fields["Nats-Expected-Last-Subject-Sequence"] = str(expected_last_subject_sequence)
        if ttl is not None:
            fields["Nats-TTL"] = f"{max(1, round(ttl))}s"
        if rollup:
            fields["Nats-Rollup"] = "sub"
        block = header_block.encode(fields) if fields else b""
        try:
            reply = await self._connection.request(subject, data, headers=block, timeout=timeout)
        except Unavailable as error:
            if "nobody serves" in error.message:
                raise NoStream(f"no stream takes {subject}") from None
            raise
        answer = msgspec.json.decode(reply.data, type=dict[str, Any])
        if "error" in answer:
            _raise_for(answer["error"], f"publish to {subject}")
        return int(answer["seq"])

    async def last(
        self, stream: str, subject: str, *, timeout: float = 5.0
    ) -> StoredMessage | None:
        try:
            answer = await self.api(
                f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject}, timeout=timeout
            )
        except JetStreamError as error:
            if error.error_code == _MESSAGE_NOT_FOUND:
                return None
            raise
        message = answer["message"]
        block = base64.b64decode(message.get("hdrs", ""))
        stored_at = datetime.fromisoformat(message["time"][:26].rstrip("Z")).replace(tzinfo=UTC)
        return StoredMessage(
            message["subject"],
            int(message["seq"]),
            stored_at.timestamp(),
            header_block.decode(block),
            base64.b64decode(message.get("data", "")),
        )

    async def message_count(self, stream: str, *, timeout: float = 5.0) -> int:
        answer = await self.api(f"STREAM.INFO.{stream}", {}, timeout=timeout)
        return int(answer["state"]["messages"])

    async def consume(
        self,
        stream: str,
        on_message: Callable[[StoredMessage], None],
        *,
        subject: str = "",
        start_sequence: int = 1,
        last_per_subject: bool = False,
        on_restart: Callable[[], None] | None = None,
        on_caught_up: Callable[[], None] | None = None,
    ) -> NatsOrderedConsumer:
        consumer = NatsOrderedConsumer(
            self._connection, stream, on_message, subject, start_sequence, last_per_subject
        )
        consumer.on_restart = on_restart
        consumer.on_caught_up = on_caught_up
        await consumer.start()
        return consumer


class NatsOrderedConsumer:
    """Reads a stream without acknowledgements and starts over whenever in doubt."""

    def __init__(
        self,
        connection: NatsConnection,
        stream: str,
        on_message: Callable[[StoredMessage], None],
        subject: str,
        start_sequence: int,
        last_per_subject: bool,
    ) -> None:
        self.on_restart: Callable[[], None] | None = None
        self.on_caught_up: Callable[[], None] | None = None
        self._caught_up = False
        self._connection = connection
        self._stream = stream
        self._on_message = on_message
        self._subject = subject
        self._next_sequence = start_sequence
        self._last_per_subject = last_per_subject
        self._inbox = ""
        self._subscription: NatsSubscription | None = None
        self._consumer = ""
        self._delivered = 0
        self._heard = 0.0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Create the consumer and begin delivery.

        Raises:
            NoStream: the stream does not exist.
            Unavailable: the server does not answer.
        """
        await self._create()
        self._stop_listening = self._connection.on_state(self._on_state)
        self._task = self._loop.create_task(self._watch(), name=f"consume-{self._stream}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        if self._stop_listening is not None:
            self._stop_listening()
        self._drop_subscription()
        if self._consumer and self._connection.state is ConnectionState.CONNECTED:
            name, self._consumer = self._consumer, ""
            api = self._connection.jetstream.api
            try:
                await api(f"CONSUMER.DELETE.{self._stream}.{name}", {}, timeout=1.0)
            except DynbusError as error:
                # The server forgets an idle ephemeral consumer by itself after 5 s.
                logger.debug("consumer %s was not deleted: %s", name, error)

    def _drop_subscription(self) -> None:
        if self._subscription is not None:
            self._subscription.unsubscribe()
            self._subscription = None

    async def _create(self) -> None:
        self._drop_subscription()
        # A new inbox per try: what an earlier consumer still delivers cannot be mistaken.
        token = secrets.token_hex(8)
        self._inbox = f"{self._connection.inbox}c.{token}"
        self._delivered = 0
        self._subscription = self._connection.subscribe(self._inbox, self._receive)
        config: dict[str, Any] = {
            "deliver_subject": self._inbox,
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "flow_control": True,
            "idle_heartbeat": int(IDLE_HEARTBEAT * _NANOSECONDS),
            "inactive_threshold": 5 * _NANOSECONDS,
            "mem_storage": True,
            "num_replicas": 1,
        }
        if self._last_per_subject:
            config["deliver_policy"] = "last_per_subject"
        else:
            config["deliver_policy"] = "by_start_sequence"
            config["opt_start_seq"] = max(1, self._next_sequence)
        config["filter_subject"] = self._subject or ">"
        call = f"CONSUMER.CREATE.{self._stream}.{token}.{config['filter_subject']}"
        request = {"stream_name": self._stream, "config": config | {"name": token}}
        self._heard = self._loop.time()
        self._caught_up = False
        answer = await self._connection.jetstream.api(call, request, timeout=5.0)
        self._consumer = token
        self._heard = self._loop.time()
        # Delivery may have begun before this answer, so what is pending counts from the start.
        if int(answer.get("num_pending", 0)) + int(answer["delivered"]["consumer_seq"]) == 0:
            self._note_caught_up()

    async def _watch(self) -> None:
        delay = RESTART_DELAY
        while True:
            try:
                async with asyncio.timeout(IDLE_HEARTBEAT):
                    await self._wake.wait()
            except TimeoutError:
                if self._loop.time() - self._heard < IDLE_HEARTBEAT * MISSED_HEARTBEATS:
                    continue
            self._wake.clear()
            if self._connection.state is not ConnectionState.CONNECTED:
                continue
            try:
                if self._last_per_subject and self.on_restart is not None:
                    self.on_restart()
                await self._create()
                delay = RESTART_DELAY
            except DynbusError as error:
                logger.debug("consumer of %s not restarted: %s", self._stream, error)
                await asyncio.sleep(delay)
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
            fields = header_block.decode(message.headers)
            last = fields.get("Nats-Last-Consumer", "")
            if last.isdigit() and int(last) > self._delivered:
                self._wake.set()
            stalled = fields.get("Nats-Consumer-Stalled", "")
            if stalled.startswith("$JS.FC."):
                self._connection.publish(stalled, b"")
            return
        position = _position(message.reply)
        if position is None:
            return
        stream_sequence, consumer_sequence, nanoseconds, pending = position
        if consumer_sequence != self._delivered + 1:
            self._wake.set()
            return
        self._delivered = consumer_sequence
        self._next_sequence = stream_sequence + 1
        self._on_message(
            StoredMessage(
                message.subject,
                stream_sequence,
                nanoseconds / _NANOSECONDS,
                header_block.decode(message.headers),
                message.data,
                pending,
            )
        )
        if pending == 0:
            self._note_caught_up()

    def _note_caught_up(self) -> None:
        if not self._caught_up:
            self._caught_up = True
            if self.on_caught_up is not None:
                self.on_caught_up()


def _position(reply: str) -> tuple[int, int, int, int] | None:
    """(stream sequence, consumer sequence, nanoseconds, pending) of an ack subject."""
    tokens = reply.split(".")
    if tokens[:2] != ["$JS", "ACK"] or len(tokens) not in (9, 11, 12):
        return None
    numbers = tokens[5:9] if len(tokens) == 9 else tokens[7:11]
    if not all(number.isdigit() for number in numbers):
        return None
    return int(numbers[0]), int(numbers[1]), int(numbers[2]), int(numbers[3])
