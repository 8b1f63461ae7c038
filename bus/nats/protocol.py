"""Reading what nats-server sends, without a way to make the reader stop.

The reader turns chunks of bytes into calls. Nothing that a peer can put into a message
(subject, headers, data) is interpreted here beyond lengths, so no message can break it; only
a server that breaks the protocol itself raises `ProtocolViolation`, and the connection is
then made anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from dynbus.bus.transport import Message

MAX_CONTROL_LINE: Final = 64 * 1024
"""An INFO line of a large cluster is the longest legal one."""

_LINE: Final = rb"MSG ([^ \r\n]+) ([0-9]{1,18}) (?:([^ \r\n]+) )?"
_message: Final = re.compile(_LINE + rb"([0-9]{1,18})\r\n").match
_headed_message: Final = re.compile(b"H" + _LINE + rb"([0-9]{1,18}) ([0-9]{1,18})\r\n").match


def heard_by(subject: str) -> Callable[[str], object] | None:
    """The test whether a subscription hears a message, by its subject; None for a subscription
    without wildcards, which hears its own subject alone."""
    tokens = subject.split(".")
    if "*" not in tokens and tokens[-1] != ">":
        return None
    wild = {"*": "[^.]+", ">": ".+"}
    return re.compile(r"\.".join(wild.get(token, re.escape(token)) for token in tokens)).fullmatch


class ProtocolViolation(Exception):
    """Raised when the bytes from the server are not the NATS protocol."""


class ServerReader:
    """Splits a server's bytes into messages and control lines.

    Args:
        on_message: called with the subscription's number and each message.
        on_control: called with each other line: `PING`, `PONG`, `INFO {...}`, `-ERR '...'`.
    """

    __slots__ = ("_on_control", "_on_message", "_rest")

    def __init__(
        self,
        on_message: Callable[[int, Message], None],
        on_control: Callable[[bytes], None],
    ) -> None:
        self._on_message = on_message
        self._on_control = on_control
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        """Take in the next bytes; whatever they complete is handed on before this returns.

        Raises:
            ProtocolViolation: they are not what a NATS server sends.
        """
        data = self._rest + chunk if self._rest else chunk
        position, length = 0, len(data)
        is_line = False
        on_message = self._on_message
        while position < length:
            first = data[position]
            if first == 77:  # MSG subject sid [reply] size
                match = _message(data, position)
            elif first == 72:  # HMSG subject sid [reply] header-size size
                match = _headed_message(data, position)
            else:
                eol = data.find(b"\r\n", position)
                is_line = eol < 0
                if is_line:
                    break
                self._on_control(data[position:eol])
                position = eol + 2
                continue
            if match is None:
                is_line = _is_incomplete(data, position)
                break
            body = match.end()
            if first == 77:
                subject, number, reply, size = match.groups()
                split = body
            else:
                subject, number, reply, header_size, size = match.groups()
                split = body + int(header_size)
            end = body + int(size)
            if split > end:
                raise _malformed(data, position)
            if length < end + 2:
                break
            message = Message(
                str(subject, "utf-8", "replace"),
                str(reply, "utf-8", "replace") if reply else "",
                data[body:split],
                data[split:end],
            )
            on_message(int(number), message)
            position = end + 2
        self._rest = data[position:]
        if is_line and len(self._rest) > MAX_CONTROL_LINE:
            raise ProtocolViolation(f"a control line of more than {MAX_CONTROL_LINE} bytes")


def _is_incomplete(data: bytes, position: int) -> bool:
    """True if the end of a message's line is still to come.

    Raises:
        ProtocolViolation: it is there, and the line is malformed.
    """
    if data.find(b"\r\n", position) < 0:
        return True
    raise _malformed(data, position)


def _malformed(data: bytes, position: int) -> ProtocolViolation:
    line = data[position:].partition(b"\r\n")[0]
    return ProtocolViolation(f"a malformed message line: {line[:120]!r}")
