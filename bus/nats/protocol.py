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

MAX_DIGITS: Final = 18


def heard_by(subject: str) -> Callable[[str], object] | None:
    """What says whether a subscription hears a message, by its subject; None for a subscription
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
        position = 0
        on_message = self._on_message
        while True:
            eol = data.find(b"\r\n", position)
            if eol < 0:
                break
            first = data[position]
            if first == 77:  # MSG subject sid [reply] size
                fields = data[position + 4 : eol].split(b" ")
                body = eol + 2
                end = body + _size(fields, 3)
                if len(data) < end + 2:
                    break
                reply = fields[2].decode("utf-8", "replace") if len(fields) == 4 else ""
                message = Message(fields[0].decode("utf-8", "replace"), reply, b"", data[body:end])
                on_message(int(fields[1]), message)
                position = end + 2
            elif first == 72:  # HMSG subject sid [reply] header-size size
                fields = data[position + 5 : eol].split(b" ")
                body = eol + 2
                end = body + _size(fields, 4)
                if len(data) < end + 2:
                    break
                split = body + _header_size(fields)
                reply = fields[2].decode("utf-8", "replace") if len(fields) == 5 else ""
                message = Message(
                    fields[0].decode("utf-8", "replace"),
                    reply,
                    data[body:split],
                    data[split:end],
                )
                on_message(int(fields[1]), message)
                position = end + 2
            else:
                self._on_control(data[position:eol])
                position = eol + 2
        self._rest = data[position:]
        if eol < 0 and len(self._rest) > MAX_CONTROL_LINE:
            raise ProtocolViolation(f"a control line of more than {MAX_CONTROL_LINE} bytes")


def _size(fields: list[bytes], least: int) -> int:
    if (
        least <= len(fields) <= least + 1
        and fields[1].isdigit()
        and fields[-1].isdigit()
        and len(fields[1]) <= MAX_DIGITS
        and len(fields[-1]) <= MAX_DIGITS
    ):
        return int(fields[-1])
    raise ProtocolViolation(f"a malformed message line: {b' '.join(fields)[:120]!r}")


def _header_size(fields: list[bytes]) -> int:
    if (
        fields[-2].isdigit()
        and len(fields[-2]) <= MAX_DIGITS
        and int(fields[-2]) <= int(fields[-1])
    ):
        return int(fields[-2])
    raise ProtocolViolation(f"a malformed message line: {b' '.join(fields)[:120]!r}")
