"""`FlightEvents`: what happens to instances, calls and requests, in the flights of namespaces."""

from __future__ import annotations

import logging
import secrets
from hashlib import blake2b
from typing import Final, TypeAlias

import msgspec

from dynbus.bus.background import Background
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import DynbusError
from dynbus.bus.transport import Connection

from .recorder import FlightRecorder

logger = logging.getLogger(__name__)

Value: TypeAlias = str | int | float | bool

EVENT: Final = "event"
"""The kind of these records."""


class Event(msgspec.Struct, frozen=True, array_like=True, tag=EVENT):
    """Something that happened.

    Attributes:
        what: a word and what became of it, such as `instance.ready`.
        who: the address of what it happened to.
        request: the digest of a request's id; empty where it is about none.
        details: numbers, codes and addresses; never a text of a user's.
    """

    what: str
    who: str
    request: str
    details: dict[str, Value]


_event = msgspec.msgpack.Decoder(Event)


def decode_event(body: msgspec.Raw) -> Event:
    """The event in a record of that kind.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _event.decode(body)


def digest_of_request(request_id: str) -> str:
    """The digest by which a request is called in a flight: 16 hexadecimal digits."""
    # JSON may bring half of a surrogate pair.
    return blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class FlightEvents:
    """Records the events of a process. Belongs to the running loop.

    Args:
        connection, background: of a recorder for each namespace.
    """

    def __init__(self, connection: Connection, background: Background) -> None:
        self._connection = connection
        self._background = background
        self._recorders: dict[str, FlightRecorder] = {}
        self._key = secrets.token_bytes(16)
        self._is_over = False

    def __repr__(self) -> str:
        return f"<FlightEvents [{', '.join(self._recorders)}]>"

    def note(
        self, namespace: str, what: str, who: str, request_id: str = "", /, **details: Value
    ) -> None:
        """Record that something has happened just now, see `Event`; nothing once it is closed."""
        if self._is_over:
            return
        recorder = self._recorders.get(namespace)
        if recorder is None:
            try:
                recorder = FlightRecorder(self._connection, self._background, namespace)
            except DynbusError as error:
                # The process comes to its end, which its callers need not know.
                logger.debug("%s of %s is not recorded: %s", what, who, error)
                return
            self._recorders[namespace] = recorder
        request = digest_of_request(request_id) if request_id else ""
        recorder.note(Event(what, who, request, details), monotonic())

    def digest(self, name: str) -> str:
        """A name by which nobody finds what it was, the same as long as this process lives."""
        data = name.encode("utf-8", "surrogatepass")
        return blake2b(data, digest_size=8, key=self._key).hexdigest()

    def close(self) -> None:
        """Send what is gathered."""
        self._is_over = True
        for recorder in self._recorders.values():
            recorder.close()
