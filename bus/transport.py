"""The ports through which dynbus uses a message bus: connections, streams, consumers.

`Connection` is one connection; `nats/connection.py` implements it over nats-server and
`memory/bus.py` over nothing, both with the part of it that is here, `WatchedConnection`. Both pass
the same contract suite (`tests/contracts`).
Publishing and delivery are plain functions: a callback runs inside the reader, once per message,
and hands on what takes longer.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from math import isclose
from typing import Final, NamedTuple, Protocol, TypedDict, Unpack

import msgspec

from .background import Background
from .drops import DropReason
from .errors import DynbusError, Unavailable
from .protocol import headers
from .protocol.names import follow_subjects, look_up_subjects, read_subjects

logger = logging.getLogger(__name__)

REPLICAS: Final = 3
"""Servers that keep a stream, as far as a cluster has them: one of three may be lost."""

_TTL = re.compile(r"(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?([0-9]{1,9})s?")


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message as delivered.

    Attributes:
        headers: the raw header block, empty when there is none; see `headers.decode`.
    """

    subject: str
    reply: str
    headers: bytes
    data: bytes

    @property
    def found_nobody(self) -> bool:
        """True if it is the server's answer that a subject has no subscriber."""
        return self.headers.startswith(headers.NOBODY)


Callback = Callable[[Message], None]


class ConnectionState(enum.Enum):
    """The state of a connection to its server."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    CLOSED = "closed"


class Subscription(Protocol):
    """A live subscription; it survives reconnects."""

    @property
    def subject(self) -> str: ...
    def unsubscribe(self) -> None:
        """Stop delivery at once; more calls change nothing."""

    async def drain(self, *, timeout: float = 5.0) -> None:
        """Have the server send no more, and stop delivery after what was on its way.

        While disconnected nothing is on its way; with a server that does not answer, nothing can be
        after `timeout` seconds.
        """
        ...


class StreamLimits(NamedTuple):
    """The limits of a JetStream stream; None means no limit.

    Over a limit the oldest messages go.

    Attributes:
        max_bytes: of all messages.
        max_age: seconds.
        max_messages_per_subject: newest kept.
        duplicate_window: seconds in which a message id is remembered.
        discard_new: refuse with `StreamFull` what would exceed `max_bytes` or
            `max_messages`, instead of dropping the oldest messages.
        max_message_size: bytes of headers and data of one message; a larger one is refused with
            `PayloadTooLarge`.
        keep_first: refuse with `StreamFull` what would exceed `max_messages_per_subject`, too: what
            is stored stays until it is purged, or rolled up. It takes `discard_new` and that limit.
    """

    max_bytes: int | None = None
    max_age: float | None = None
    max_messages: int | None = None
    max_messages_per_subject: int | None = None
    duplicate_window: float = 120.0
    discard_new: bool = False
    max_message_size: int | None = None
    keep_first: bool = False


class StreamSource(NamedTuple):
    """The stream of another region that a stream here copies, as long as there is a way.

    Attributes:
        region: the JetStream domain that has it.
    """

    region: str
    stream: str


class StreamConfig(NamedTuple):
    """A JetStream stream.

    Attributes:
        marker_ttl: seconds for which an expired or deleted subject leaves a marker, at least 1; 0
            for message TTLs without markers, None for no message TTLs.
        rollup: whether a message may take the place of all earlier ones, those of other subjects
            too: a publisher of one subject may clear the stream. Markers take it.
        work_queue: each message goes to one consumer and is gone when acknowledged.
        replicas: how many servers of a cluster keep it at most; a smaller cluster keeps it on
            as many as it has. None for the number that the connection has for all streams.
        metadata: names, which begin with `dynbus.`, and texts that are kept with it.
        lanes: over how many lanes the messages of its first subject are spread, which ends with
            `.*`: what is published as `x.key` is kept as `x.lane.key`, whose lane is the 32-bit
            FNV-1a hash of the key, modulo this. 0 for messages that are kept as they are published.
        mirror: the stream of which it copies everything with its sequence and its time, also what a
            work queue there hands out and drops; nobody else stores anything in it then.
    """

    name: str
    subjects: tuple[str, ...]
    limits: StreamLimits = StreamLimits()
    marker_ttl: float | None = None
    rollup: bool = False
    work_queue: bool = False
    in_memory: bool = False
    replicas: int | None = None
    description: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    lanes: int = 0
    mirror: StreamSource | None = None

    @property
    def to_look_up(self) -> tuple[str, ...]:
        """The subjects that a client publishes to in order to look up single messages of it."""
        return look_up_subjects(self.name)

    @property
    def to_read(self) -> tuple[str, ...]:
        """The subjects that a client publishes to in order to read its present content."""
        return read_subjects(self.name)

    @property
    def to_follow(self) -> tuple[str, ...]:
        """The subjects that a client publishes to in order to read it and all that is stored from
        then on.
        """
        return follow_subjects(self.name)

    def differences(self, existing: StreamConfig, *fields: str) -> list[str]:
        """The limits of a stream that are others than these, as `name = value, not value`.

        Args:
            fields: that are compared as well.
        """
        pairs = [(name, getattr(existing, name), getattr(self, name)) for name in fields]
        pairs += zip(StreamLimits._fields, existing.limits, self.limits, strict=True)
        return [f"{name} = {has}, not {own}" for name, has, own in pairs if not _is_met(has, own)]


def _is_met(existing: object, wanted: object) -> bool:
    if isinstance(existing, float) and isinstance(wanted, float):
        # The server keeps whole nanoseconds: a third of a second comes back as another float.
        return isclose(existing, wanted, rel_tol=1e-12, abs_tol=2e-9)
    return existing == wanted


class StoredMessage(NamedTuple):
    """A message in a stream.

    Attributes:
        sequence: its position in the stream, from 1.
        time: Unix seconds at which the server stored it.
        pending: messages behind it that this consumer has not got yet.
    """

    subject: str
    sequence: int
    time: float
    headers: Mapping[str, str]
    data: bytes
    pending: int = 0

    @property
    def ttl(self) -> float | None:
        """Seconds after which it expires; None where it does not say that."""
        match = _TTL.fullmatch(self.headers.get(headers.TTL, ""))
        if match is None:
            return None
        hours, minutes, seconds = (float(part or 0) for part in match.groups())
        return 3600 * hours + 60 * minutes + seconds

    @property
    def is_marker(self) -> bool:
        """True if it only says that its subject expired or was deleted."""
        return headers.MARKER_REASON in self.headers or self.headers.get(headers.KV_OPERATION) in (
            "DEL",
            "PURGE",
        )


class StreamInfo(NamedTuple):
    """The contents of a stream in numbers.

    Attributes:
        messages: how many, markers included.
        size: their bytes as the server counts them.
        first_sequence: of the oldest message; `last_sequence + 1` when there is none, and 0
            when there never was one.
        last_sequence: of the newest message that was ever stored; 0 when there was none.
        created: Unix seconds. A stream that was deleted and made again has another one, and
            its sequences begin at 1 again.
        replicas: how many servers keep it.
        in_cluster: whether more servers could.
        now: Unix seconds by the clock of the server that answered, as it did.
        first_time: Unix seconds at which the oldest message was stored; 0 when there is none.
        silent: of a mirror, seconds since its source was heard, which says something every second;
            None before it is heard for the first time, and for no mirror.
        metadata: as of `StreamConfig`.
        behind: the servers among those that keep it whose copies are not complete.
    """

    messages: int
    size: int
    first_sequence: int
    last_sequence: int
    created: float
    replicas: int = 1
    in_cluster: bool = False
    now: float = 0.0
    first_time: float = 0.0
    silent: float | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    behind: tuple[str, ...] = ()

    @property
    def oldest_age(self) -> float:
        """Seconds since the oldest message was stored; 0 when there is none."""
        return max(0.0, self.now - self.first_time) if self.messages else 0.0


class WrongLastSequence(DynbusError):
    """Raised when a publish expected another last sequence of its subject."""

    code = "WrongLastSequence"


class NoStream(DynbusError):
    """Raised when the stream of a subject or a consumer does not exist, or the consumer itself."""

    code = "NoStream"
    retryable = True


class NoRollup(DynbusError):
    """Raised for a message that would take the place of all earlier ones, where the stream takes
    none."""

    code = "NoRollup"


class StreamFull(DynbusError):
    """Raised when a stream that keeps its old messages has no room for a new one."""

    code = "StreamFull"
    retryable = True


class SubjectTaken(StreamFull):
    """Raised when a stream keeps the message that it has of a subject, and takes no other one."""

    code = "SubjectTaken"
    retryable = False


class NoRoom(DynbusError):
    """Raised when the server has no room on its disk for a stream, or may not use it."""

    code = "NoRoom"
    retryable = True


class PullConsumerConfig(NamedTuple):
    """A consumer of a stream, whose messages its readers share.

    Attributes:
        ack_wait: seconds after which a message that nobody acknowledged is delivered again.
        max_ack_pending: messages that may be delivered and not acknowledged at a time; None for any
            number: those that wait for their time are among them. With 1 a message that is
            delivered again comes before all that are behind it.
        subject: what is delivered of the stream (wildcards allowed). Two consumers of a work queue
            have no subject in common.
        subjects: the same of a consumer that has several, in place of `subject`.
        new_only, start_time: where it begins, in place of the oldest message: after the newest, or
            at the first that was stored at a time in Unix seconds.
    """

    name: str
    ack_wait: float = 30.0
    max_ack_pending: int | None = None
    subject: str = ">"
    subjects: tuple[str, ...] = ()
    new_only: bool = False
    start_time: float | None = None
    description: str = ""


class ConsumerInfo(NamedTuple):
    """The progress of the readers of a pull consumer.

    Attributes:
        pending: messages that were not delivered yet.
        ack_pending: messages that were delivered and are not acknowledged, those that are to be
            delivered again counted in.
        ack_wait: seconds; that of the consumer as it is, 0 where nothing is acknowledged.
        delivered: the sequence of the message that was delivered last for the first time; 0 for
            none.
        description: of the consumer.
    """

    pending: int
    ack_pending: int
    ack_wait: float
    delivered: int = 0
    description: str = ""


class Delivery(NamedTuple):
    """A message that waits for its acknowledgement.

    Attributes:
        tries: how often it was delivered, this time included.
        token: what `JetStream.acknowledge` is told.
    """

    message: StoredMessage
    tries: int
    token: str


class AckKind(enum.StrEnum):
    """The kind of an acknowledgement of a delivery."""

    ACK = "+ACK"
    """Done: a work queue drops it."""
    NAK = "-NAK"
    """Deliver it again."""
    TERM = "+TERM"
    """Never deliver it again: a work queue drops it."""
    IN_PROGRESS = "+WPI"
    """Wait for another `ack_wait`."""


def ack_payload(kind: AckKind, delay: float) -> bytes:
    """The payload of an acknowledgement; `delay` is the seconds before a `NAK` is delivered
    again."""
    if kind is AckKind.NAK and delay > 0:
        return f'{kind} {{"delay": {int(delay * 1e9)}}}'.encode()
    return kind.encode()


class PullReader(Protocol):
    """A reader of a pull consumer. What it has asked for comes in the end, whatever becomes of the
    connection and the server meanwhile."""

    @property
    def wanted(self) -> int:
        """Deliveries that were asked for and have not come yet."""
        ...

    def ask(self, count: int) -> None:
        """Have `count` more messages delivered, as soon as there are any."""
        ...

    async def withdraw(self) -> None:
        """Want nothing any more of what was asked for; what is on its way is delivered before this
        returns, and what the server is told after this begins finds nobody here who wants it."""
        ...

    async def stop(self) -> None:
        """Withdraw, and never ask again."""
        ...


class OrderedConsumer(Protocol):
    """A reader of a stream that restarts itself after gaps, silence and reconnects."""

    async def stop(self) -> None: ...


class ConsumeOptions(TypedDict, total=False):
    """The options of `JetStream.consume`, which reads all of a stream from the first message unless
    told otherwise.

    Attributes:
        subject: what is read of it; wildcards allowed.
        start_sequence: the first to be delivered, also when it lies ahead.
        last_per_subject: begin with the last message of each subject.
        created: when the stream was made of which `start_sequence` is (see `StreamInfo`).
            Another stream of that name is read as one made again.
        on_restart: called before the last messages are delivered once more.
        on_recreated: called before the first message of a stream that was deleted and made
            again, which is read from its first message.
        on_caught_up: called once per start, when everything that the stream held at that start
            has been delivered, as far as the server of the consumer knew.
        at_least: the sequence of a message that is known to be there. In a cluster a consumer may
            be at a server that has not stored it yet: it has not caught up before it is delivered.
    """

    subject: str
    start_sequence: int
    at_least: int
    last_per_subject: bool
    created: float | None
    on_restart: Callable[[], None] | None
    on_recreated: Callable[[], None] | None
    on_caught_up: Callable[[], None] | None


class PublishOptions(TypedDict, total=False):
    """The options of `JetStream.publish` beside storing a message.

    Attributes:
        message_id: a repeat within the stream's window is stored once; the sequence of the first
            is returned.
        expected_last_subject_sequence: that of the subject's last message, 0 for none.
        expected_subject: the subject whose last message that is, in place of the message's own.
        ttl: whole seconds after which the message expires, at least 1.
        rollup: drop all earlier messages of the subject.
        deleted: the message is the marker that is left of a record which somebody has deleted.
        headers: further ones.
    """

    message_id: str
    expected_last_subject_sequence: int | None
    expected_subject: str
    ttl: float
    rollup: bool
    deleted: bool
    headers: Mapping[str, str] | None


def publish_headers(options: PublishOptions) -> bytes:
    """The header block that says so to the server; empty without options.

    Raises:
        ConfigError: a key or a value has a character that a header cannot carry.
    """
    fields = dict(options.get("headers") or {})
    if message_id := options.get("message_id"):
        fields[headers.MESSAGE_ID] = message_id
    if (expected := options.get("expected_last_subject_sequence")) is not None:
        fields[headers.EXPECTED_LAST_SUBJECT_SEQUENCE] = str(expected)
        if expected_subject := options.get("expected_subject"):
            fields[headers.EXPECTED_LAST_SUBJECT] = expected_subject
    if (ttl := options.get("ttl")) is not None:
        fields[headers.TTL] = f"{max(1, round(ttl))}s"
    if options.get("rollup"):
        fields[headers.ROLLUP] = "sub"
    if options.get("deleted"):
        fields[headers.KV_OPERATION] = "DEL"
    return headers.encode(fields) if fields else b""


class JetStream(Protocol):
    """The persistent half of a connection. Every call is bounded by `timeout` seconds and
    raises `Unavailable` when no answer came in that time."""

    @property
    def max_payload(self) -> int:
        """Bytes of headers and data that one message may have."""
        ...

    @property
    def replicas(self) -> int:
        """The number of servers of a cluster that keep a stream which does not say so itself."""
        ...

    def of_region(self, region: str) -> JetStream:
        """That of another region, by its JetStream domain: its streams can be asked about, read
        and purged, and their consumers paused, as long as there is a way. Nothing is stored there,
        and nothing taken."""
        ...

    async def ensure_stream(
        self, config: StreamConfig, *, probe: str = "", timeout: float = 5.0
    ) -> None:
        """Make the stream, or leave one that exists with these subjects as it is, except that
        it gets the replicas that it lacks where the cluster has servers for them.

        Args:
            probe: a subject of it that we may publish to; it is refused then where another
                region, beyond a leaf node, stores it as well.

        Raises:
            ConfigError: a stream of this name exists that takes other subjects, takes messages
                from elsewhere or hands them on, or another region stores them.
            PermissionDenied: there is none, and we may not make it.
            NoRoom: there is none, and no room to make it.
        """
        ...

    async def has_stream(self, config: StreamConfig, *, timeout: float = 5.0) -> bool:
        """True if there is a stream of this name; nothing is made or changed.

        Raises:
            ConfigError: there is another one, as `ensure_stream` refuses it.
        """
        ...

    async def write_error(self, stream: str, *, timeout: float = 5.0) -> str:
        """The reason for which the store of a stream takes nothing any more, in the server's words;
        empty for one that is well.

        After a full disk a stream refuses every write, without an answer and also when there is
        space again, until it is made again or its server is restarted.

        Raises:
            NoStream: the stream does not exist.
            PermissionDenied: who asks must be allowed to purge the stream.
        """
        ...

    async def delete_stream(self, name: str, *, timeout: float = 5.0) -> None:
        """Delete a stream; one that does not exist is no error."""
        ...

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        timeout: float = 5.0,
        **options: Unpack[PublishOptions],
    ) -> int:
        """Store a message and return its sequence once the server has acknowledged it.

        Raises:
            WrongLastSequence: `expected_last_subject_sequence` does not hold.
            NoStream: no stream takes the subject.
            StreamFull: the stream is full, and `discard_new`.
            SubjectTaken: the subject has its message already, and `keep_first`.
            PayloadTooLarge: the stream takes no message of this size.
        """
        ...

    async def last(
        self, stream: str, subject: str, *, timeout: float = 5.0
    ) -> StoredMessage | None:
        """The last message of a subject, markers included; None when there is none.

        Raises:
            NoStream: the stream does not exist.
        """
        ...

    async def read(
        self, stream: str, subject: str = "", *, timeout: float = 5.0
    ) -> list[StoredMessage]:
        """The messages of a subject in a stream (wildcards allowed), or all, oldest first.

        Any replica answers, so it needs no leader; what it says may be some moments old.

        Raises:
            NoStream: no replica of the stream answers.
        """
        ...

    async def read_page(
        self, stream: str, subject: str = "", *, start: int = 1, timeout: float = 5.0
    ) -> list[StoredMessage]:
        """The first of these messages from a sequence on, as `read` has them: as many as fit into a
        page, and none where there are no more.

        For streams that may hold more than fits into memory, or than is read in a time.
        """
        ...

    async def read_last(
        self, stream: str, subjects: Sequence[str], *, timeout: float = 5.0
    ) -> list[StoredMessage]:
        """The last message of each of some subjects (wildcards allowed) that the stream has, oldest
        first, in one question; as `read` any replica answers it.

        Raises:
            NoStream: no replica of the stream answers.
            Unavailable: there are more than 1,024.
        """
        ...

    async def read_one(
        self, stream: str, subject: str, *, timeout: float = 5.0
    ) -> StoredMessage | None:
        """The last message of one subject; None when there is none. As `read` any replica answers
        it, and the permission to ask can be for this subject alone.

        Raises:
            NoStream: no replica of the stream answers.
        """
        ...

    async def purge(
        self, stream: str, subject: str = "", *, up_to: int = 0, timeout: float = 5.0
    ) -> int:
        """Drop the messages of a subject (wildcards allowed), or all; returns how many.

        Args:
            up_to: the last sequence that is dropped; 0 for no such limit.

        Raises:
            NoStream: the stream does not exist.
        """
        ...

    async def stream_info(self, stream: str, *, timeout: float = 5.0) -> StreamInfo:
        """The contents of a stream at this moment, in numbers.

        Raises:
            NoStream: the stream does not exist.
        """
        ...

    async def stream_config(self, stream: str, *, timeout: float = 5.0) -> StreamConfig:
        """The configuration of a stream as it is.

        Raises:
            NoStream: the stream does not exist.
        """
        ...

    async def note(self, stream: str, name: str, text: str, *, timeout: float = 5.0) -> None:
        """Keep a text with a stream, among its `metadata`; nothing else of it changes.

        Raises:
            NoStream: the stream does not exist.
            PermissionDenied: we may not change it.
        """
        ...

    async def consume(
        self,
        stream: str,
        on_message: Callable[[StoredMessage], None],
        **options: Unpack[ConsumeOptions],
    ) -> OrderedConsumer:
        """Read a stream in order, without acknowledgements, until stopped.

        With `last_per_subject` each start first brings the last message of every subject;
        after a restart it does so again, announced by `on_restart`. Otherwise a restart goes
        on at the next sequence and nothing is delivered twice.

        Raises:
            NoStream: the stream does not exist.
        """
        ...

    async def ensure_pull_consumer(
        self, stream: str, config: PullConsumerConfig, *, timeout: float = 5.0
    ) -> None:
        """Make a consumer of a stream, or leave one of this name as it is.

        Raises:
            NoStream: the stream does not exist.
        """
        ...

    async def delete_consumer(self, stream: str, consumer: str, *, timeout: float = 5.0) -> None:
        """Delete a consumer; one that does not exist is no error."""
        ...

    async def consumer_info(
        self, stream: str, consumer: str, *, timeout: float = 5.0
    ) -> ConsumerInfo:
        """The progress of the readers of a pull consumer at this moment.

        Raises:
            NoStream: the stream or the consumer does not exist.
        """
        ...

    async def pause_consumer(
        self, stream: str, consumer: str, paused: bool, *, timeout: float = 5.0
    ) -> None:
        """Deliver nothing to the readers of a pull consumer, or deliver again. What was delivered
        is acknowledged as ever.

        Raises:
            NoStream: the stream or the consumer does not exist.
        """
        ...

    def pull(
        self,
        stream: str,
        consumer: str,
        on_delivery: Callable[[Delivery], None],
        *,
        on_missing: Callable[[], None],
    ) -> PullReader:
        """Read messages that other readers of the consumer do not get, as many as are asked for.

        Args:
            on_missing: called when the stream or the consumer does not exist (any more), possibly
                again and again; once it is made, reading goes on.
        """
        ...

    async def delete_message(self, stream: str, sequence: int, *, timeout: float = 5.0) -> bool:
        """Drop one message of a work queue; False when there is none (any more).

        Raises:
            NoStream: the stream does not exist.
        """
        ...

    async def acknowledge(
        self, token: str, kind: AckKind, *, delay: float = 0.0, timeout: float = 5.0
    ) -> None:
        """Say what became of a delivery; on return the server has heard it.

        It counts for the message, whichever reader got it last. Of a message that is settled
        already nothing changes, and that is no error.

        Args:
            delay: seconds before a message with `NAK` is delivered again.

        Raises:
            Unavailable: the server did not answer in time, or knows the consumer no longer. A
                server that was killed may have forgotten that it had delivered the message, and
                answers nothing until it has delivered it again.
        """
        ...


class Connection(Protocol):
    """One connection to the bus, owned by the event loop that opened it."""

    @property
    def state(self) -> ConnectionState: ...
    @property
    def is_connected(self) -> bool:
        """True if it can reach its server, as far as it knows."""
        ...

    @property
    def background(self) -> Background:
        """The task group that reads and watches for it; where that fails, it is of no use any
        more."""
        ...

    @property
    def sessions(self) -> int:
        """The number of times that it has been connected."""
        ...

    @property
    def max_payload(self) -> int:
        """Bytes of headers and data that one message may have."""
        ...

    @property
    def backlog(self) -> int:
        """Bytes that were published and not yet given to the operating system."""
        ...

    @property
    def round_trip(self) -> float:
        """Seconds that the last answered ping took; 0 before the first, and without a server."""
        ...

    @property
    def server_name(self) -> str:
        """The address connected to, without credentials."""
        ...

    @property
    def region(self) -> str:
        """The region of the server: its JetStream domain; empty for none, and before the first
        session."""
        ...

    @property
    def jetstream(self) -> JetStream: ...

    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: bytes = b"") -> None:
        """Send a message in this turn of the loop. While disconnected it is dropped and counted:
        a sender that needs an answer resends, so a stale copy would only be a duplicate.

        Raises:
            PayloadTooLarge: headers and data exceed `max_payload`; nothing was sent.
        """
        ...

    def before_sending(self, publish: Callable[[], object]) -> None:
        """Have `publish` called once, when what this turn of the loop has published is about to be
        sent: what it publishes goes along. For senders that collect what a turn brings."""
        ...

    def send_now(self) -> None:
        """Send what this turn of the loop has published until now, before its end: for what has to
        be out before something else is told.
        """
        ...

    def subscribe(self, subject: str, callback: Callback, *, queue: str = "") -> Subscription:
        """Deliver messages of a subject (wildcards allowed) to `callback`.

        Those that were published there: what a stream delivers to the subject is dropped, whichever
        client had it do so.
        An exception out of `callback` is logged; it never stops the reader.
        """
        ...

    async def barrier(self, *, timeout: float = 5.0) -> None:
        """Wait until the server knows every subscription made so far, and whatever it had for this
        connection until then has been delivered.

        Raises:
            Unavailable: it did not answer in time.
        """
        ...

    async def drained(self, *, timeout: float = 5.0) -> None:
        """Wait until `backlog` is small again."""
        ...

    def on_state(self, listener: Callable[[ConnectionState], None]) -> Callable[[], None]:
        """Call `listener` at every later change of `state`; what is returned ends that."""
        ...

    def on_connected(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call `listener` each time that it reaches a server again; what is returned ends that."""
        ...

    @property
    def has_peers(self) -> bool:
        """True if the server belongs to a cluster; False while disconnected."""
        ...

    def on_peer_lost(self, listener: Callable[[], None]) -> None:
        """Call `listener()` when the server tells that its cluster has lost another one, whose
        clients are about to come back elsewhere."""
        ...

    def leave_server(self, why: str) -> None:
        """Have all connections of the process go to another server, if there is one; this one
        answers, and is of no use."""
        ...

    def on_error(self, listener: Callable[[DynbusError, str], None]) -> None:
        """Call `listener(error, subject)` when the server refuses a subject."""
        ...

    def on_drop(self, listener: Callable[[DropReason], None]) -> None:
        """Call `listener(reason)` for every message that this connection drops: what is
        published while disconnected, and what comes for nobody any longer."""
        ...

    async def close(self) -> None:
        """Send what is buffered and close; more calls change nothing."""
        ...


class WatchedConnection:
    """The part that every connection has: its state, the work beside its callers, and who is told
    of both and of what is dropped. Lives on one event loop.

    Attributes:
        background: what reads and watches for the connection; it ends with it.
        sessions: how often it has been connected.
    """

    def __init__(self, name: str, state: ConnectionState) -> None:
        self.name = name
        self._state = state
        self.sessions = int(state is ConnectionState.CONNECTED)
        self._loop = asyncio.get_running_loop()
        self._listeners: list[Callable[[ConnectionState], None]] = []
        self._drop_listeners: list[Callable[[DropReason], None]] = []
        self.background = Background(name)

    @property
    def state(self) -> ConnectionState:
        return self._state

    @property
    def is_connected(self) -> bool:
        return self._state is ConnectionState.CONNECTED

    def on_connected(self, listener: Callable[[], object]) -> Callable[[], None]:
        def on_state(state: ConnectionState) -> None:
            if state is ConnectionState.CONNECTED:
                listener()

        return self.on_state(on_state)

    def on_state(self, listener: Callable[[ConnectionState], None]) -> Callable[[], None]:
        self._listeners.append(listener)

        def end() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return end

    def on_drop(self, listener: Callable[[DropReason], None]) -> None:
        self._drop_listeners.append(listener)

    def drop(self, reason: DropReason) -> None:
        """Tell the listeners that a message is dropped, and why."""
        for listener in self._drop_listeners:
            listener(reason)

    async def wait_connected(self) -> None:
        """Wait until there is a session.

        Raises:
            Unavailable: the connection is closed.
        """
        while self._state is not ConnectionState.CONNECTED:
            if self._state is ConnectionState.CLOSED:
                raise Unavailable("the connection is closed")
            waiter: asyncio.Future[None] = self._loop.create_future()

            def wake(_: ConnectionState, waiter: asyncio.Future[None] = waiter) -> None:
                if not waiter.done():
                    waiter.set_result(None)

            end = self.on_state(wake)
            try:
                await waiter
            finally:
                end()

    def _set_state(self, state: ConnectionState) -> None:
        if state is self._state or self._state is ConnectionState.CLOSED:
            return
        self._state = state
        self.sessions += state is ConnectionState.CONNECTED
        for listener in list(self._listeners):
            try:
                listener(state)
            except Exception:
                # One listener must not keep the others, or the reader, from going on.
                logger.exception("%s: a listener to the state raised", self.name)
