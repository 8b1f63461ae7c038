"""`FlightEvents`: what happens to instances, calls and requests, in the flights of namespaces."""

from __future__ import annotations

import logging
import secrets
from hashlib import blake2b

from dynbus.bus.background import Background
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import DynbusError
from dynbus.bus.transport import Connection

from .recorder import FlightRecorder
from .records import Event, Value
from .sampling import Sampling

logger = logging.getLogger(__name__)


def digest_of_request(request_id: str) -> str:
    """The digest by which a request is called in a flight: 16 hexadecimal digits."""
    # JSON may bring half of a surrogate pair.
    return blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class FlightEvents:
    """Records the events of a process. Belongs to the running loop.

    Args:
        connection, background, sampling: of a recorder for each namespace.
    """

    def __init__(self, connection: Connection, background: Background, sampling: Sampling) -> None:
        self._connection = connection
        self._background = background
        self._sampling = sampling
        self._recorders: dict[str, FlightRecorder] = {}
        self._key = secrets.token_bytes(16)
        self._is_over = False

    def __repr__(self) -> str:
        return f"<FlightEvents [{', '.join(self._recorders)}]>"

    def note(
        self, namespace: str, what: str, who: str, request_id: str = "", /, **details: Value
    ) -> None:
        """Record that something has happened just now, see `Event`; nothing once it is closed."""
        request = digest_of_request(request_id) if request_id else ""
        self._note(namespace, what, who, request, details)

    def note_request(
        self, namespace: str, what: str, who: str, request_id: str, details: dict[str, Value]
    ) -> None:
        """Record what has happened to one of many requests, unless it is of those that are not
        recorded since there are too many.

        Args:
            details: which are kept.
        """
        request = digest_of_request(request_id)
        if self._sampling.one_in > 1:
            share = self._sampling.share(int(request, 16))
            if not share:
                return
            details["one_in"] = share
        self._note(namespace, what, who, request, details)

    def _note(
        self, namespace: str, what: str, who: str, request: str, details: dict[str, Value]
    ) -> None:
        if self._is_over:
            return
        recorder = self._recorders.get(namespace)
        if recorder is None:
            try:
                recorder = FlightRecorder(
                    self._connection, self._background, namespace, self._sampling
                )
            except DynbusError as error:
                # The process comes to its end, which its callers need not know.
                logger.debug("%s of %s is not recorded: %s", what, who, error)
                return
            self._recorders[namespace] = recorder
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
