"""Finding strings that end a text which comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Looks for the first of some strings, and holds back what may be the beginning of one.

    The first is the one that is complete first, and of several that are complete with the same
    character the longest. How the text is cut into pieces makes no difference.

    Raises:
        ValueError: one of the strings is empty.
    """

    __slots__ = ("_held", "_matched", "_retreats", "_strings")

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise ValueError("a stop string is empty: leave it out")
        # Of several that end together the longest is found first.
        self._strings = sorted(set(strings), key=len, reverse=True)
        self._retreats = [_retreats(string) for string in self._strings]
        self._matched = [0] * len(self._strings)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece.

        Returns:
            The text that is certain by now, and the stop string that comes after it, if any. No
            more may be pushed after one.
        """
        whole = self._held + text
        begin = len(self._held)
        for place in range(begin, len(whole)):
            found = self._step(whole[place])
            if found is not None:
                self._held = ""
                return whole[: place + 1 - len(found)], found
        keep = len(whole) - max(self._matched)
        self._held = whole[keep:]
        return whole[:keep], None

    def take_held(self) -> str:
        """What is held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Take a character; returns the string that is complete with it."""
        found: str | None = None
        for index, string in enumerate(self._strings):
            length = self._matched[index]
            while length and string[length] != character:
                length = self._retreats[index][length - 1]
            if string[length] == character:
                length += 1
            if length == len(string) and found is None:
                found = string
            self._matched[index] = length
            if found is not None:
                break
        return found


@lru_cache(maxsize=1024)
def _retreats(string: str) -> tuple[int, ...]:
    """For each end of a beginning of the string: how much of the string's beginning it ends with,
    itself not counted (the failure function of Knuth, Morris and Pratt)."""
    retreats = [0]
    length = 0
    for character in string[1:]:
        while length and string[length] != character:
            length = retreats[length - 1]
        if string[length] == character:
            length += 1
        retreats.append(length)
    return tuple(retreats)
