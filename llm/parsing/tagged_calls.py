"""Calls between tags: as JSON, as Hermes and Qwen write them, or as Qwen3-Coder does."""

from __future__ import annotations

from typing import Final

from .delta import DeltaBuilder
from .functions import Functions, is_text, value_as_json
from .incoming import IncomingText, Markers, Reading
from .json_calls import MAX_NAME, read_call
from .json_text import as_json

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"

_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"

_NAME_END = Markers(">", "\n")
_VALUE_ENDS = Markers(_PARAMETER_END, _PARAMETER, _FUNCTION_END)
"""Models forget the first."""


def read_tagged_calls(
    text: IncomingText, out: DeltaBuilder, functions: Functions, *, open_tags: Markers
) -> Reading[None]:
    """Read a text with calls such as

        <tool_call>
        {"name": "f", "arguments": {"x": 1}}
        </tool_call>

    or

        <tool_call>
        <function=f>
        <parameter=x>
        1
        </parameter>
        </function>
        </tool_call>

    Args:
        functions: say of the values of the second form which are text, and which JSON.
        open_tags: with which a call begins.
    """
    while True:
        piece, tag = text.read_to_marker(open_tags)
        out.say(piece)
        if tag:
            yield from _read_call(text, out, functions, tag)
        elif text.has_ended:
            return
        else:
            yield


def _read_call(
    text: IncomingText, out: DeltaBuilder, functions: Functions, tag: str
) -> Reading[None]:
    text.keep()
    if tag == OPEN:
        text.read(len(OPEN))
    while True:
        sign = yield from text.skip_space()
        if sign == "{":
            is_whole = yield from read_call(text, out)
        else:
            is_whole = yield from _read_function(text, out, functions)
        if not is_whole:
            break
        text.keep()
        # Some write several calls between one pair of tags.
        if (yield from text.skip_space()) not in ("{", "<"):
            break
        if (yield from text.begins_with(CLOSE)):
            text.read(len(CLOSE))
            text.let_go()
            return
        if not (yield from text.begins_with(_FUNCTION)) and (yield from text.peek()) == "<":
            break
    out.say(text.give_back())


def _read_function(text: IncomingText, out: DeltaBuilder, functions: Functions) -> Reading[bool]:
    if not (yield from text.begins_with(_FUNCTION)):
        return False
    text.read(len(_FUNCTION))
    name = yield from _read_name(text)
    if not name:
        return False
    before = ""
    while True:
        if before:
            text.keep()
        yield from text.skip_space()
        if (yield from text.begins_with(_PARAMETER)):
            text.read(len(_PARAMETER))
            parameter = yield from _read_name(text)
            if not parameter:
                return False
            text.let_go()
            if not before:
                out.begin_call(name)
            out.add_arguments(f"{before or '{'}{as_json(parameter)}: ")
            before = ", "
            yield from _read_value(text, out, functions.types(name, parameter))
            continue
        is_ended = yield from text.begins_with(_FUNCTION_END)
        if is_ended:
            text.read(len(_FUNCTION_END))
        elif not (yield from text.begins_with(CLOSE)):
            return False
        if not before:
            out.begin_call(name)
        out.add_arguments("}" if before else "{}")
        return True


def _read_name(text: IncomingText) -> Reading[str]:
    """The name at whose beginning `text` is, in a tag; empty where there is none."""
    name = yield from text.read_until(_NAME_END, MAX_NAME)
    if (yield from text.peek()) != ">":
        return ""
    text.read(1)
    return name.strip()


def _read_value(text: IncomingText, out: DeltaBuilder, types: frozenset[str]) -> Reading[None]:
    """Read a value but for the line breaks that are its tags' own."""
    streams = is_text(types)
    pieces: list[str] = []
    if streams:
        out.add_arguments('"')
    if (yield from text.peek()) == "\n":
        text.read(1)
    held = ""
    while True:
        piece, tag = text.read_to_marker(_VALUE_ENDS)
        piece = held + piece
        held = "\n" if piece.endswith("\n") else ""
        piece = piece.removesuffix("\n")
        if streams:
            out.add_arguments(as_json(piece)[1:-1])
        else:
            pieces.append(piece)
        if tag or text.has_ended:
            break
        yield
    if tag == _PARAMETER_END:
        text.read(len(_PARAMETER_END))
    if not streams:
        out.add_arguments(value_as_json("".join(pieces), types))
    elif tag:
        out.add_arguments('"')
