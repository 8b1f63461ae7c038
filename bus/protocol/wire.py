"""Version 1 of the wire: what frames and the records of instances hold, and how they become bytes.

A message on a frames or control subject is one msgpack array, a `Batch`: who sends, and any
number of frames of any number of calls. Every frame is an array whose first element is its
kind; `docs/protocol.md` has the table. Nothing here does I/O.

Units are what a stream's sequence numbers count: an item, a part of an item, or the end.
"""

from __future__ import annotations

import math
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from dynbus.bus.errors import DynbusError, HandlerError, Overloaded, safe_text

from .names import InstanceName

VERSION: Final = 1
SECRET_BYTES: Final = 16

MAX_PARTS: Final = 4096
"""Messages that one request may be split over."""

MAX_FRAME_BYTES: Final = 256 * 1024
"""Bytes of whole items that one frame may carry, and of one unit."""

MAX_FRAMES: Final = 8192
"""Frames that one message may carry."""

MAX_CALLS: Final = 16384
"""Calls that one heartbeat may list, and that it may acknowledge."""

MAX_SENDER: Final = 255
MAX_INCARNATION: Final = 64
"""Characters."""

MAX_MESSAGE: Final = 4096
MAX_TRACEBACK: Final = 32768
MAX_NAME: Final = 512
MAX_FAILED: Final = 64 * 1024
"""Characters of an error's texts; more than a message holds would never arrive."""

MAX_RETRY_AFTER: Final = 86_400.0
"""Seconds after which a call is tried again at the latest, whatever an instance says."""

BATCH_OVERHEAD: Final = 128
"""Bytes to leave free in a message beside the units of its frames."""


Secret = Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
"""The random bytes of a request."""

_Calls = Annotated[list[tuple[int, int]], Meta(max_length=MAX_CALLS)]
_Done = Annotated[list[tuple[int, Secret]], Meta(max_length=MAX_CALLS)]


class _Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fields every frame of a call begins with.

    Attributes:
        number: the request's number, unique per client.
        secret: the 16 random bytes of the request; a frame with others is dropped.
        attempt: which attempt at the request it belongs to; fences the earlier ones.
    """

    number: int
    secret: Secret
    attempt: int


class Item(_Frame, frozen=True, array_like=True, gc=False, tag=12):
    """One whole item: what a stream sends at each step of its engine."""

    sequence: int
    data: bytes


class Items(_Frame, frozen=True, array_like=True, gc=False, tag=0):
    """Several whole items. `sequence` numbers the first; the others follow by one."""

    sequence: int
    items: list[bytes]


class Part(_Frame, frozen=True, array_like=True, gc=False, tag=1):
    """A piece of an item that is larger than a message; the next `Items` or `End` completes it."""

    sequence: int
    data: bytes


class End(_Frame, frozen=True, array_like=True, gc=False, tag=2):
    """The one terminal frame of a call that went well; `data` is a unary result."""

    sequence: int
    data: bytes | None


class Failed(_Frame, frozen=True, array_like=True, gc=False, tag=3):
    """The one terminal frame of a call that did not."""

    sequence: int
    code: str
    message: str
    retryable: bool
    started: bool
    hop: str
    request_id: str
    retry_after: float
    traceback: str
    error_type: str = ""

    @classmethod
    def stored(cls, error: DynbusError) -> Failed:
        """An error as it is kept where it is of no frame; `error` gives it back."""
        return failed_frame(0, bytes(SECRET_BYTES), 0, 0, error)

    @property
    def error(self) -> DynbusError:
        """The error that it carries; of an unknown code a plain `DynbusError`."""
        return error_of(self)


class Credit(_Frame, frozen=True, array_like=True, gc=False, tag=4):
    """Reader to writer: `granted` bytes in all since the start; units below `received` are held."""

    granted: int
    received: int


class Cancel(_Frame, frozen=True, array_like=True, gc=False, tag=5):
    """Reader to writer: stop, and drop the call after `kill_after` seconds.

    Attributes:
        kill_after: 0 to drop it now, negative to leave the handler to finish tidily.
    """

    kill_after: float


class Resume(_Frame, frozen=True, array_like=True, gc=False, tag=6):
    """Reader to writer: send every unit from `resume_from` again, or say `Unknown`.

    Attributes:
        age: seconds since the request was sent; None where its sender does not say.
    """

    resume_from: int
    age: float | None = None


class Unknown(_Frame, frozen=True, array_like=True, gc=False, tag=7):
    """Writer to reader: this request never began here and, from now on, never will."""


class Open(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=8):
    """Reader to writer, while calls are open: the heartbeat.

    Attributes:
        beat: its number, the same in all messages of one heartbeat; each sender's grow.
        calls: (number, next sequence) of each open call: units below it are held.
        done: (number, secret) of calls that have ended, of which nothing need be kept.
        first, last: the numbers that it speaks of, both included: a call between them that it
            does not list is not open. A `last` of None is no bound.
    """

    beat: int
    calls: _Calls
    done: _Done
    first: int = 0
    last: int | None = None


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=9):
    """Writer to reader, while calls are open: the sequence after the last unit sent, per call.

    Attributes:
        beat: its number, as in `Open`.
        blocked: seconds for which the writer's main loop has not run.
        draining: whether the instance takes no more calls.
        calls: (number, next sequence) of each open or not yet acknowledged call.
        first, last: the numbers that it speaks of, as in `Open`.
    """

    beat: int
    blocked: float
    draining: bool
    calls: _Calls
    first: int = 0
    last: int | None = None


class Ping(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=10):
    """Asks the other side's control lane for a `Pong` with the same token."""

    token: int


class Pong(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=11):
    """Answers a `Ping`."""

    token: int


Terminal = End | Failed
Frame = (
    Items
    | Part
    | End
    | Failed
    | Credit
    | Cancel
    | Resume
    | Unknown
    | Open
    | Heartbeat
    | Ping
    | Pong
    | Item
)


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One message.

    Attributes:
        version: 1.
        sender: an instance's id, or the reply base of a client.
        incarnation: random per process start of the sender.
        load: calls that run or wait at the sender, when it is an instance.
    """

    version: int
    sender: Annotated[str, Meta(max_length=MAX_SENDER)]
    incarnation: Annotated[str, Meta(max_length=MAX_INCARNATION)]
    load: int
    frames: Annotated[list[Frame], Meta(max_length=MAX_FRAMES)]


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of an instance in discovery, as JSON.

    Attributes:
        endpoints: endpoint name to its kind, `unary` or `stream`.
        schemas: endpoint name to the hash of what it reads and writes; without those for which
            that is not known.
        started: Unix time of the start, in seconds.
        address: host name and process id, for people.
        zone, host: where it is; empty where it does not say.
        limits: endpoint name to the calls that it runs at a time; without those that have no limit.
    """

    version: int = VERSION
    namespace: str
    component: str
    instance_id: str
    incarnation: str
    endpoints: dict[str, str]
    started: float
    address: str = ""
    counter: int = 0
    draining: bool = False
    metadata: dict[str, str] = {}
    schemas: dict[str, str] = {}
    zone: str = ""
    host: str = ""
    limits: dict[str, int] = {}

    @property
    def name(self) -> InstanceName:
        """The name of the instance."""
        return InstanceName(self.namespace, self.component, self.instance_id)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)
_record_decoder = msgspec.json.Decoder(InstanceRecord)


def encode_batch(sender: str, incarnation: str, load: int, frames: list[Frame]) -> bytes:
    """One message out of `frames`."""
    return _encoder.encode(Batch(VERSION, sender, incarnation, load, frames))


def decode_batch(data: bytes) -> Batch | None:
    """The batch in a message, or None for anything that is not one of version 1."""
    try:
        batch = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return batch if batch.version == VERSION else None


def encode_record(record: InstanceRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_record(data: bytes) -> InstanceRecord | None:
    """The record, or None for anything that is not one of version 1."""
    try:
        record = _record_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return record if record.version == VERSION else None


def failed_frame(
    number: int,
    secret: bytes,
    attempt: int,
    sequence: int,
    error: DynbusError,
    limit: int = MAX_FAILED,
) -> Failed:
    """The terminal frame that carries `error`, in at most about `limit` bytes.

    Handlers raise what they like, so nothing here trusts a field to be of its type.
    """
    raised = error if isinstance(error, HandlerError) else HandlerError()
    return Failed(
        number,
        secret,
        attempt,
        sequence,
        _sendable(error.code, MAX_NAME),
        _sendable(error.message, min(MAX_MESSAGE, limit // 4)),
        bool(error.retryable),
        bool(error.started),
        _sendable(error.hop, MAX_NAME),
        _sendable(error.request_id, MAX_NAME),
        _seconds(error.retry_after) if isinstance(error, Overloaded) else 0.0,
        _sendable(raised.remote_traceback, min(MAX_TRACEBACK, limit // 4)),
        _sendable(raised.error_type, MAX_NAME),
    )


def _sendable(value: object, most: int) -> str:
    """A text of at most `most` bytes that UTF-8 can carry, with the end cut off when it is long."""
    data = safe_text(value).encode("utf-8", "replace")
    if len(data) > most:
        data = data[: max(0, most - 3)] + b"..."
    return data.decode("utf-8", "replace" if len(data) < most else "ignore")


def _seconds(value: object) -> float:
    """A finite number of seconds, 0 for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def error_of(frame: Failed) -> DynbusError:
    """The error that a terminal frame carries; an unknown code is a plain `DynbusError`."""
    error = DynbusError.of_code(
        frame.code,
        frame.message,
        hop=frame.hop,
        request_id=frame.request_id,
        started=frame.started,
    )
    error.retryable = frame.retryable
    if isinstance(error, Overloaded):
        # Callers sleep for so long, and tell it to others in whole seconds.
        error.retry_after = min(max(0.0, _seconds(frame.retry_after)), MAX_RETRY_AFTER)
    if isinstance(error, HandlerError):
        error.remote_traceback = frame.traceback
        error.error_type = frame.error_type
    return error
