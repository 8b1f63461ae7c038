"""Calls that are written as JSON objects: their name, and their arguments or parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .delta import DeltaBuilder
from .functions import Functions
from .incoming import IncomingText, Reading
from .json_text import as_json, decoded, read_json, read_json_string

MAX_NAME: Final = 1024
"""Characters of a function's name, or of a key, as JSON."""

_ARGUMENTS: Final = ("arguments", "parameters")
_BESIDE: Final = ("id", "index", "type")
"""The keys that models copy from requests; they say nothing that a call does not have."""


def read_call(
    text: IncomingText, out: DeltaBuilder, offered: Functions | None = None
) -> Reading[bool]:
    """Read a call such as `{"name": "f", "arguments": {"x": 1}}`, at whose brace `text` is.

    The call begins with its arguments, once its name is known. Members that no call has are
    content. Where this returns False, `text` gives back what of it is in no call.

    Args:
        text: keeps what is taken.
        offered: one of which a call has to name where no marker says that it is one; its first
            member must be one that calls have, too.
    """
    reader = _CallReader(text, out, offered)
    is_whole = yield from reader.read()
    if reader.has_begun:
        out.say("".join(reader.others))
    return is_whole


def read_calls(text: IncomingText, out: DeltaBuilder) -> Reading[bool]:
    """Read an array of such calls, at whose bracket `text` is; see `read_call`."""
    before = out.calls
    text.read(1)
    sign = yield from text.skip_space()
    while sign != "]":
        if sign != "{" or not (yield from read_call(text, out)):
            return False
        text.keep()
        sign = yield from text.skip_space()
        if sign == ",":
            text.read(1)
            sign = yield from text.skip_space()
    if out.calls == before:
        return False
    text.read(1)
    return True


class _CallReader:
    """Reads one call.

    Attributes:
        has_begun: whether `out` has it.
        others: members that are content.
    """

    def __init__(self, text: IncomingText, out: DeltaBuilder, offered: Functions | None) -> None:
        self._text = text
        self._out = out
        self._offered = offered
        self._name = ""
        self._has_arguments = False
        self._waiting: list[str] = []
        self.has_begun = False
        self.others: list[str] = []

    def read(self) -> Reading[bool]:
        text = self._text
        sign = text.read(1)
        while sign != "}":
            yield from text.skip_space()
            key = yield from read_json_string(text, MAX_NAME)
            if key is None or (yield from text.skip_space()) != ":":
                return False
            text.read(1)
            yield from text.skip_space()
            if not (yield from self._read_member(key, is_first=sign == "{")):
                return False
            if self.has_begun:
                # What came so far is told.
                text.keep()
            sign = yield from text.skip_space()
            if sign == ",":
                text.read(1)
                if (yield from text.skip_space()) == "}":
                    sign = "}"
            elif sign != "}":
                return False
        if not self._name:
            return False
        text.read(1)
        if not self._has_arguments:
            self._begin()
            self._out.add_arguments("{}")
        return True

    def _read_member(self, key: str, *, is_first: bool) -> Reading[bool]:
        if key == "name" and not self._name:
            return (yield from self._read_name())
        if key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            return (yield from self._read_arguments())
        if self._offered is not None and is_first and key not in _BESIDE:
            return False
        pieces = [as_json(key), ": "]
        is_whole = yield from read_json(self._text, pieces.append)
        if is_whole and key not in _BESIDE:
            self.others += pieces
        return is_whole

    def _read_name(self) -> Reading[bool]:
        name = yield from read_json_string(self._text, MAX_NAME)
        if not name or (self._offered is not None and name not in self._offered):
            return False
        self._name = name
        if self._has_arguments:
            self._begin()
        return True

    def _begin(self) -> None:
        self._text.let_go()
        self._out.begin_call(self._name)
        self.has_begun = True
        for piece in self._waiting:
            self._out.add_arguments(piece)

    def _read_arguments(self) -> Reading[bool]:
        take: Callable[[str], None] = self._waiting.append
        sign = yield from self._text.peek()
        if self._name and sign:
            self._begin()
            take = self._out.add_arguments
        if sign in ("{", "["):
            return (yield from read_json(self._text, take))
        # Some models write the arguments as a string that has their JSON text, as requests do.
        pieces: list[str] = []
        is_whole = yield from read_json(self._text, pieces.append)
        given = "".join(pieces)
        said = decoded(given) if sign == '"' else given
        take(given if said is None else "{}" if said in ("", "null") else said)
        return is_whole
