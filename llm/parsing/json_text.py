"""JSON that is passed on as it comes, character by character as the model wrote it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from .incoming import IncomingText, Reading

MAX_DEPTH: Final = 256
"""Of objects and arrays within each other; what clients read JSON with takes little more."""

_SPACE = re.compile(r"[ \t\n\r]*")
_IN_STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_SCALAR = re.compile(r"[-+.0-9A-Za-z_]+")

_CLOSERS: Final = {"{": "}", "[": "]"}


class JsonText:
    """Finds the end of a JSON value in a text that comes in pieces.

    It looks no closer than this needs: numbers and escapes may be wrong, a comma may be too many.

    Attributes:
        is_whole: whether its end was found. That of a number is not, unless it is within something.
        is_broken: whether what came next cannot belong to it.
    """

    __slots__ = (
        "_closers",
        "_is_escaped",
        "_is_in_scalar",
        "_is_in_string",
        "_wants",
        "is_broken",
        "is_whole",
    )

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._wants: Literal["value", "item", "key", "colon", "next"] = "value"
        self._is_in_string = False
        self._is_escaped = False
        self._is_in_scalar = False
        self.is_whole = False
        self.is_broken = False

    def find_end(self, text: str, start: int) -> int:
        """The position at which that which belongs to it ends in the next text: at its end, where
        it is whole or broken, or at that of the text."""
        place = start
        while place < len(text) and not self.is_whole:
            if self._is_escaped:
                self._is_escaped = False
                place += 1
            elif self._is_in_string:
                place = self._after_string(text, place)
            elif self._is_in_scalar:
                scalar = _SCALAR.match(text, place)
                place = scalar.end() if scalar else place
                if place < len(text):
                    self._is_in_scalar = False
                    self.is_whole = not self._closers
            else:
                space = _SPACE.match(text, place)
                place = space.end() if space else place
                if place < len(text):
                    if not self._takes(text[place]):
                        self.is_broken = True
                        break
                    place += 1
        return place

    def _after_string(self, text: str, place: int) -> int:
        inner = _IN_STRING.match(text, place)
        place = inner.end() if inner else place
        if place < len(text):
            if text[place] == '"':
                self._is_in_string = False
                self.is_whole = not self._closers
            else:
                # The last character that is there is a backslash.
                self._is_escaped = True
            place += 1
        return place

    def _takes(self, sign: str) -> bool:
        """Take a character outside of strings and scalars, where it may stand there."""
        wants = self._wants
        takes_value = wants in ("value", "item")
        if sign == '"' and (takes_value or wants == "key"):
            self._is_in_string = True
            self._wants = "next" if takes_value else "colon"
        elif sign in _CLOSERS and takes_value and len(self._closers) < MAX_DEPTH:
            self._closers.append(_CLOSERS[sign])
            self._wants = "key" if sign == "{" else "item"
        elif self._closers and sign == self._closers[-1] and wants in ("item", "key", "next"):
            self._closers.pop()
            self._wants = "next"
            self.is_whole = not self._closers
        elif sign == ":" and wants == "colon":
            self._wants = "value"
        elif sign == "," and wants == "next":
            self._wants = "key" if self._closers[-1] == "}" else "item"
        elif takes_value and _SCALAR.match(sign):
            self._is_in_scalar = True
            self._wants = "next"
        else:
            return False
        return True


def read_json(
    text: IncomingText, take: Callable[[str], None], limit: int | None = None
) -> Reading[bool]:
    """Read a JSON value, and hand its text on as it comes; returns whether it was whole.

    Args:
        limit: characters that it may have at most; None for any number.
    """
    value = JsonText()
    left = limit
    while True:
        piece = text.read_by(value.find_end, left)
        if piece:
            take(piece)
        if value.is_whole:
            return True
        if left is not None:
            left -= len(piece)
        if value.is_broken or text.has_ended or left == 0:
            return False
        yield


def read_json_string(text: IncomingText, limit: int) -> Reading[str | None]:
    """Read a JSON string; None where it is none, or has more characters than the limit."""
    if (yield from text.peek()) != '"':
        return None
    pieces: list[str] = []
    if not (yield from read_json(text, pieces.append, limit)):
        return None
    return decoded("".join(pieces))


def decoded(string: str) -> str | None:
    """The value of a JSON string; None where it is none."""
    try:
        return msgspec.json.decode(string, type=str)
    except (ValueError, msgspec.MsgspecError):
        return None


def as_json(string: str) -> str:
    """A string as JSON."""
    return json.dumps(string, ensure_ascii=False)
