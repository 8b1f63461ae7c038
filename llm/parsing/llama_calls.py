"""Calls as Llama 3 writes them: a whole answer of JSON, or JSON after a token."""

from __future__ import annotations

from typing import Final

from .delta import DeltaBuilder
from .functions import Functions
from .incoming import IncomingText, Markers, Reading
from .json_calls import read_call, read_calls

TAG: Final = "<|python_tag|>"

_TAGS = Markers(TAG)


def read_llama_calls(text: IncomingText, out: DeltaBuilder, offered: Functions) -> Reading[None]:
    """Read a text that begins with calls such as `{"name": "f", "parameters": {"x": 1}}`, or has
    some after a tag; semicolons stand between them.

    Args:
        offered: the request's functions. An answer in JSON is a call only of these,
            unless it has the tag.
    """
    text.keep()
    if (yield from text.skip_space()) == "{":
        yield from _read_objects(text, out, offered)
    else:
        out.say(text.give_back())
    while True:
        piece, tag = text.read_to_marker(_TAGS)
        out.say(piece)
        if tag:
            text.keep()
            text.read(len(TAG))
            sign = yield from text.skip_space()
            if sign == "{":
                yield from _read_objects(text, out, None)
            elif sign != "[" or not (yield from read_calls(text, out)):
                # Python, for an interpreter that nobody offered.
                out.say(text.give_back())
        elif text.has_ended:
            return
        else:
            yield


def _read_objects(
    text: IncomingText, out: DeltaBuilder, offered: Functions | None
) -> Reading[None]:
    sign = "{"
    while sign == "{":
        if not (yield from read_call(text, out, offered)):
            break
        text.keep()
        sign = yield from text.skip_space()
        if sign in (";", ","):
            text.read(1)
            sign = yield from text.skip_space()
    out.say(text.give_back())
