"""Calls as a list of Python's, as Llama 3.2 and 4 and others write them."""

from __future__ import annotations

import re
from typing import Final

from .delta import DeltaBuilder
from .functions import Functions
from .incoming import IncomingText, Reading
from .json_calls import MAX_NAME
from .json_text import as_json
from .python_text import read_python

STARTS: Final = ("<|python_start|>", "<|python_tag|>")
END: Final = "<|python_end|>"

_NAME = re.compile(r"[\w.-]*")


def read_pythonic_calls(text: IncomingText, out: DeltaBuilder, offered: Functions) -> Reading[None]:
    """Read the calls with which a text begins, such as `[f(x=1, y="two"), g()]`.

    Args:
        offered: the request's functions. A list is one of calls only where it begins
            with one of these, unless it has a token before it.
    """
    text.keep()
    yield from text.skip_space()
    is_marked = False
    for start in STARTS:
        if (yield from text.begins_with(start)):
            text.read(len(start))
            is_marked = True
    if (yield from text.skip_space()) == "[":
        is_whole = yield from _read_list(text, out, None if is_marked else offered)
        if is_whole and is_marked:
            text.keep()
            yield from text.skip_space()
            if (yield from text.begins_with(END)):
                text.read(len(END))
                text.let_go()
    out.say(text.give_back())


def _read_list(text: IncomingText, out: DeltaBuilder, offered: Functions | None) -> Reading[bool]:
    sign = "["
    while sign != "]":
        text.read(1)
        if (yield from text.skip_space()) == "]" and sign == ",":
            break
        name = yield from text.read_run(_NAME, MAX_NAME)
        if not name or (offered is not None and name not in offered):
            return False
        if (yield from text.skip_space()) != "(":
            return False
        if not (yield from _read_arguments(text, out, name)):
            return False
        text.keep()
        sign = yield from text.skip_space()
        if sign not in (",", "]"):
            return False
    text.read(1)
    text.let_go()
    return True


def _read_arguments(text: IncomingText, out: DeltaBuilder, function: str) -> Reading[bool]:
    before = ""
    sign = text.read(1)
    while sign != ")":
        if (yield from text.skip_space()) == ")":
            break
        name = yield from text.read_run(_NAME, MAX_NAME)
        if not name or (yield from text.skip_space()) != "=":
            return False
        text.read(1)
        text.let_go()
        if not before:
            out.begin_call(function)
        out.add_arguments(f"{before or '{'}{as_json(name)}: ")
        before = ", "
        if not (yield from read_python(text, out.add_arguments)):
            return False
        text.keep()
        sign = yield from text.skip_space()
        if sign == ",":
            text.read(1)
        elif sign != ")":
            return False
    text.read(1)
    if not before:
        out.begin_call(function)
    out.add_arguments("}" if before else "{}")
    return True
