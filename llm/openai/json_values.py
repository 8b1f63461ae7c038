"""The number of values in JSON, found without reading it.

What is decoded becomes Python's objects while nothing else runs, at up to 300 ns and 200 bytes for
each: some megabytes of brackets are seconds and gigabytes. Counting bytes takes a hundredth of it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

MAX_VALUES: Final = 50_000
"""Objects, lists and strings of one request, the names of fields among them: 15 ms."""

MAX_ITEMS: Final = 500_000
"""Commas of one request: a list of so many token ids takes 20 ms."""

_PIECE: Final = 1 << 20
"""Bytes between which others have their turn."""


class JsonSize:
    """The values in JSON, counted in one text after the other."""

    def __init__(self) -> None:
        # Objects, lists and strings; and commas between them.
        self._values = self._items = 0
        # What strings say is counted as well of these, which is little of nearly all that is sent.
        self._rough: list[bytes] = []
        self._exact = (0, 0)

    def __repr__(self) -> str:
        return f"<JsonSize [{self._values} values, {self._items} items]>"

    def add(self, data: bytes) -> str:
        """Count what a text has; of what is no JSON that is any number.

        Returns:
            Why there is too much to be decoded; empty where there is not.
        """
        self._rough.append(data)
        self._count(data)
        if self._problem:
            self._count_again()
        return self._problem

    @property
    def _problem(self) -> str:
        if self._values > MAX_VALUES:
            what = f"{MAX_VALUES} objects, lists and strings"
        elif self._items > MAX_ITEMS:
            what = f"{MAX_ITEMS} items in lists"
        else:
            return ""
        return f"it has more than {what} as JSON, which is the most that is taken; send less of it"

    def _count(self, data: bytes) -> None:
        quotes = 0
        for begin in range(0, len(data), _PIECE):
            end = begin + _PIECE
            self._values += data.count(b"[", begin, end) + data.count(b"{", begin, end)
            self._items += data.count(b",", begin, end)
            quotes += data.count(b'"', begin, end)
        self._values += quotes // 2

    def _count_again(self) -> None:
        """Count what is outside of strings."""
        plain = b"".join(map(_without_escapes, self._rough))
        self._rough = []
        self._values, self._items = self._exact
        is_within = 0
        for begin in range(0, len(plain), _PIECE):
            signs = np.frombuffer(plain[begin : begin + _PIECE], np.uint8)
            quotes = (signs == ord('"')).view(np.uint8)
            # Within a string their number so far is odd.
            is_outside = np.bitwise_xor.accumulate(quotes) == is_within
            # An opening bracket and an opening brace differ in one bit.
            opens = (signs | 0x20) == ord("{")
            count = int(np.count_nonzero(quotes)) + is_within
            self._values += int(np.count_nonzero(opens & is_outside)) + count // 2
            self._items += int(np.count_nonzero((signs == ord(",")) & is_outside))
            is_within = count % 2
            if self._problem:
                break
        self._exact = (self._values, self._items)


def _without_escapes(data: bytes) -> bytes:
    """A text of whose quotation marks each stands at an end of a string."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    # One that breaks off in a string, so that the next text does not begin in it.
    return plain + b'"' if plain.count(b'"') % 2 else plain
