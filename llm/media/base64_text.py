"""Base64 of images, in pieces: of one that is megabytes, each call would keep all other threads
from working, and the streams of others from going on."""

from __future__ import annotations

import binascii
from typing import Final

PIECE: Final = 3 * 32 * 1024
"""Bytes of a piece; as base64 it is 128 KiB, which take half a millisecond."""

_ENCODED_PIECE: Final = PIECE // 3 * 4


def decoded(text: str, begin: int) -> tuple[bytes, str]:
    """The bytes that a text stands for, and the text itself without line breaks.

    Args:
        begin: the place of its first character.

    Raises:
        ValueError: it is no base64.
    """
    try:
        return _decoded(text, begin), text[begin:]
    except ValueError:
        # As some encoders have it.
        joined = "".join(text[begin:].split())
        if len(joined) == len(text) - begin:
            raise
        return _decoded(joined, 0), joined


def _decoded(text: str, begin: int) -> bytes:
    padding = text.find("=", begin)
    if 0 <= padding < len(text) - 2:
        raise ValueError("base64 goes on behind its end")
    pieces = [
        binascii.a2b_base64(text[at : at + _ENCODED_PIECE], strict_mode=True)
        for at in range(begin, len(text), _ENCODED_PIECE)
    ]
    return b"".join(pieces)


def encoded(data: bytes) -> str:
    """Bytes as base64."""
    pieces = [
        binascii.b2a_base64(data[at : at + PIECE], newline=False).decode("ascii")
        for at in range(0, len(data), PIECE)
    ]
    return "".join(pieces)
