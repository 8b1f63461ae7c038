"""Python's literals, read as they come and handed on as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final, Literal

from .incoming import IncomingText, Reading
from .json_text import MAX_DEPTH, as_json

MAX_WORD: Final = 256
"""Characters of a number."""

_CLOSERS: Final = {"{": "}", "[": "]", "(": ")"}
_AS_JSON: Final = {"{": "{", "[": "[", "(": "[", "}": "}", "]": "]", ")": "]"}

_WORD = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS: Final = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}

_PLAIN: Final = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_ESCAPES: Final = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}


def read_python(text: IncomingText, take: Callable[[str], None]) -> Reading[bool]:
    """Read a literal of Python, and hand its JSON on as it comes; returns whether it was whole.

    Tuples become arrays. Sets, bytes and keys that are no strings are none that JSON has.
    """
    closers: list[str] = []
    wants: Literal["value", "item", "key", "colon", "next"] = "value"
    comma = ""
    while True:
        sign = yield from text.skip_space()
        takes_value = wants in ("value", "item")
        if sign in ("'", '"') and (takes_value or wants == "key"):
            take(comma)
            if not (yield from _read_string(text, take)):
                return False
            wants = "next" if takes_value else "colon"
        elif sign in _CLOSERS and takes_value and len(closers) < MAX_DEPTH:
            take(comma + _AS_JSON[text.read(1)])
            closers.append(_CLOSERS[sign])
            wants = "key" if sign == "{" else "item"
        elif closers and sign == closers[-1] and wants in ("item", "key", "next"):
            # Python takes a comma before it, and JSON does not.
            take(_AS_JSON[text.read(1)])
            closers.pop()
            wants = "next"
        elif sign == ":" and wants == "colon":
            text.read(1)
            take(": ")
            wants = "value"
        elif sign == "," and wants == "next":
            text.read(1)
            wants = "key" if closers[-1] == "}" else "item"
        elif takes_value:
            word = yield from text.read_run(_WORD, MAX_WORD)
            literal = _word_as_json(word)
            if literal is None:
                take(comma + word)
                return False
            take(comma + literal)
            wants = "next"
        else:
            take(comma)
            return False
        if wants == "next" and not closers:
            return True
        comma = ", " if sign == "," else ""


def _word_as_json(word: str) -> str | None:
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return None
    return repr(number) if math.isfinite(number) else None


def _read_string(text: IncomingText, take: Callable[[str], None]) -> Reading[bool]:
    quote = text.read(1)
    plain = _PLAIN[quote]
    if (yield from text.begins_with(2 * quote)):
        text.read(2)
        quote *= 3
    take('"')
    while True:
        take(as_json(text.read_match(plain))[1:-1])
        sign = yield from text.peek()
        if not sign:
            return False
        if sign == "\\":
            text.read(1)
            take((yield from _read_escape(text)))
        elif sign == quote[0]:
            if (yield from text.begins_with(quote)):
                text.read(len(quote))
                take('"')
                return True
            take(as_json(text.read(1))[1:-1])


def _read_escape(text: IncomingText) -> Reading[str]:
    """The JSON of the character after a backslash, within a string."""
    sign = yield from text.peek()
    if sign in _ESCAPES:
        text.read(1)
        return as_json(_ESCAPES[sign])[1:-1]
    if sign in _HEX_DIGITS:
        text.read(1)
        digits = yield from _read_digits(text, "0123456789abcdefABCDEF", _HEX_DIGITS[sign])
        code = int(digits, 16) if len(digits) == _HEX_DIGITS[sign] else None
        return _code_as_json(code) if code is not None else as_json(f"\\{sign}{digits}")[1:-1]
    digits = yield from _read_digits(text, "01234567", 3)
    return _code_as_json(int(digits, 8)) if digits else as_json("\\")[1:-1]


def _read_digits(text: IncomingText, known: str, count: int) -> Reading[str]:
    digits = ""
    while len(digits) < count:
        sign = yield from text.peek()
        if not sign or sign not in known:
            break
        digits += text.read(1)
    return digits


def _code_as_json(code: int) -> str:
    if 0xD800 <= code < 0xE000:
        # Half of a pair, as Python's `json` would write it.
        return f"\\u{code:04x}"
    return as_json(chr(code) if code < 0x110000 else "\N{REPLACEMENT CHARACTER}")[1:-1]
