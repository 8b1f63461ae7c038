"""Calls as Mistral's models write them: after a token, in an older and a newer way."""

from __future__ import annotations

from typing import Final

from .delta import DeltaBuilder
from .incoming import IncomingText, Markers, Reading
from .json_calls import MAX_NAME, read_call, read_calls
from .json_text import read_json

TOOL_CALLS: Final = "[TOOL_CALLS]"
ARGS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"

_MARKERS = Markers(TOOL_CALLS)
_NAME_ENDS = Markers(ARGS, CALL_ID, "{", "\n")
_ID_END = Markers(ARGS)


def read_mistral_calls(text: IncomingText, out: DeltaBuilder) -> Reading[None]:
    """Read a text with calls such as `[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]` or
    `[TOOL_CALLS]f[ARGS]{"x": 1}`."""
    while True:
        piece, marker = text.read_to_marker(_MARKERS)
        out.say(piece)
        if marker:
            text.keep()
            text.read(len(TOOL_CALLS))
            sign = yield from text.skip_space()
            if sign == "[":
                is_whole = yield from read_calls(text, out)
            elif sign == "{":
                is_whole = yield from read_call(text, out)
            else:
                is_whole = yield from _read_named(text, out)
            if is_whole:
                text.let_go()
            else:
                out.say(text.give_back())
        elif text.has_ended:
            return
        else:
            yield


def _read_named(text: IncomingText, out: DeltaBuilder) -> Reading[bool]:
    name = (yield from text.read_until(_NAME_ENDS, MAX_NAME)).strip()
    if not name or any(map(str.isspace, name)):
        return False
    if (yield from text.begins_with(CALL_ID)):
        # Those of an output are made by its reader.
        yield from text.read_until(_ID_END, MAX_NAME)
    if (yield from text.begins_with(ARGS)):
        text.read(len(ARGS))
    if (yield from text.skip_space()) != "{":
        return False
    text.let_go()
    out.begin_call(name)
    return (yield from read_json(text, out.add_arguments))
