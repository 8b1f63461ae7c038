"""Text that comes in pieces, read as if it were there."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

Reading = Generator[None, None, T]
"""A reader of incoming text that comes to a `T`: it yields where it needs more text than there
is.
"""

_SPACE = re.compile(r"\s*")


class Markers:
    """Strings that are looked for in a text."""

    __slots__ = ("_first", "_longest", "_pattern", "_strings")

    def __init__(self, *strings: str) -> None:
        self._strings = strings
        self._longest = max(map(len, strings))
        self._first = re.compile("|".join({re.escape(string[0]) for string in strings}))
        self._pattern = re.compile("|".join(map(re.escape, strings)))

    def find(self, text: str, start: int, end: int) -> re.Match[str] | None:
        """The first of them that begins between two places."""
        return self._pattern.search(text, start, end + self._longest)

    def begun(self, text: str, start: int) -> int:
        """The number of characters at the end of a text that may be the beginning of one of
        them."""
        near = max(start, len(text) - self._longest + 1)
        for match in self._first.finditer(text, near):
            rest = text[match.start() :]
            if any(string.startswith(rest) for string in self._strings):
                return len(rest)
        return 0


class IncomingText:
    """The text that is there and not read yet. All reading takes as much as there is but for a few
    characters, so that its time is that of the text, however it is cut.

    Attributes:
        has_ended: whether no more comes.
    """

    __slots__ = ("_at", "_kept", "_text", "has_ended")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None
        self.has_ended = False

    @property
    def unread(self) -> int:
        """The number of characters that are there."""
        return len(self._text) - self._at

    def feed(self, text: str) -> None:
        """Add the next piece."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def read(self, count: int) -> str:
        """The next characters, of those that are there."""
        return self._read_to(self._at + count)

    def read_all(self) -> str:
        """All that is there."""
        return self._read_to(len(self._text))

    def read_match(self, pattern: re.Pattern[str]) -> str:
        """The part that a pattern matches of what is there, which may be nothing."""
        match = pattern.match(self._text, self._at)
        return self._read_to(match.end()) if match else ""

    def read_by(self, find_end: Callable[[str, int], int], limit: int | None = None) -> str:
        """The text before the place that a function finds, given the text and where to begin.

        Args:
            limit: characters that it may be given at most.
        """
        if limit is None:
            return self._read_to(find_end(self._text, self._at))
        return self.read(find_end(self._text[self._at : self._at + limit], 0))

    def read_to_marker(self, markers: Markers) -> tuple[str, str]:
        """The text that is certain to come before the first marker, and the marker if it is there;
        the marker is not taken."""
        return self._read_to_marker(markers, len(self._text))

    def peek(self) -> Reading[str]:
        """The next character, which is not taken; empty at the end."""
        while self._at == len(self._text) and not self.has_ended:
            yield
        return self._text[self._at : self._at + 1]

    def begins_with(self, string: str) -> Reading[bool]:
        """True if the string comes next; it is not taken."""
        while not self.has_ended:
            there = self._text[self._at : self._at + len(string)]
            if len(there) == len(string) or not string.startswith(there):
                break
            yield
        return self._text.startswith(string, self._at)

    def skip_space(self) -> Reading[str]:
        """Take white space; returns what comes after it, as `peek` does."""
        while True:
            self.read_match(_SPACE)
            character = yield from self.peek()
            if not character.isspace():
                return character

    def read_run(self, pattern: re.Pattern[str], limit: int) -> Reading[str]:
        """Take characters for as long as a pattern matches them: at most one more than the limit.

        Args:
            pattern: matches any number of characters that it matches one by one.
        """
        pieces: list[str] = []
        length = 0
        while True:
            match = pattern.match(self._text, self._at, self._at + limit + 1 - length)
            piece = self._read_to(match.end()) if match else ""
            pieces.append(piece)
            length += len(piece)
            if self._at < len(self._text) or self.has_ended or length > limit:
                return "".join(pieces)
            yield

    def read_until(self, markers: Markers, limit: int) -> Reading[str]:
        """Take what comes before the first marker: at most one character more than the limit."""
        pieces: list[str] = []
        length = 0
        while True:
            piece, marker = self._read_to_marker(markers, self._at + limit + 1 - length)
            pieces.append(piece)
            length += len(piece)
            if marker or self.has_ended or length > limit:
                return "".join(pieces)
            yield

    def keep(self) -> None:
        """Keep what is taken from now on, until it is given back or let go."""
        self._kept = []

    def give_back(self) -> str:
        """The text that was read since `keep`."""
        kept = "".join(self._kept or ())
        self._kept = None
        return kept

    def let_go(self) -> None:
        """Keep no more of what is taken."""
        self._kept = None

    def _read_to_marker(self, markers: Markers, end: int) -> tuple[str, str]:
        match = markers.find(self._text, self._at, end)
        if match is not None and match.start() <= end:
            return self._read_to(match.start()), match.group()
        held = 0 if self.has_ended else markers.begun(self._text, self._at)
        return self._read_to(min(end, len(self._text) - held)), ""

    def _read_to(self, end: int) -> str:
        taken = self._text[self._at : end]
        self._at += len(taken)
        if self._kept is not None and taken:
            self._kept.append(taken)
        return taken
