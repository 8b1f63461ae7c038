"""The events of a stream over HTTP (SSE), of which servers make their chunks."""

from __future__ import annotations

import re
from typing import Final

MAX_EVENT: Final = 32 * 1024 * 1024
"""Bytes of one event."""

_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")


class EventReader:
    """Finds the data of events in pieces of a stream, without I/O."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._looked = 0

    def push(self, piece: bytes) -> list[bytes]:
        """The data of the events that end in the next piece; those without data are left out.

        Raises:
            ValueError: an event has more than `MAX_EVENT` bytes.
        """
        rest = self._rest
        text: bytes | bytearray = piece
        if rest:
            rest += piece
            text = rest
        events: list[bytes] = []
        begin, look = 0, self._looked
        while (end := _END.search(text, look)) is not None:
            data = _data_of(bytes(text[begin : end.start()]))
            if data:
                events.append(data)
            begin = look = end.end()
        if rest:
            del rest[:begin]
        elif begin < len(piece):
            rest += piece[begin:]
        # What ends it may be cut in the middle.
        self._looked = max(0, len(rest) - 3)
        if len(rest) > MAX_EVENT:
            raise ValueError(f"an event of the stream has more than {MAX_EVENT} bytes")
        return events

    def finish(self) -> list[bytes]:
        """The data of an event that the stream's end has left without an empty line."""
        data = _data_of(bytes(self._rest))
        self._rest.clear()
        return [data] if data else []


def _data_of(event: bytes) -> bytes:
    if event.startswith(b"data:") and b"\n" not in event and b"\r" not in event:
        # As nearly all are.
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)
