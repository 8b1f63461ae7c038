"""Finding strings that end a text which comes in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

_KEPT: Final = 8
"""Sets of strings whose automata are kept. Requests use few different ones, and the automaton of
64 strings of 256 characters takes 4 MB."""


class StopStrings:
    """Looks for the first of some strings, and holds back what may be the beginning of one.

    The first is the one that is complete first, and of several that are complete with the same
    character the longest. How the text is cut into pieces makes no difference. The time of a piece
    is that of its characters, however many strings there are.

    Raises:
        ValueError: one of the strings is empty.
    """

    __slots__ = ("_automaton", "_held", "_state")

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise ValueError("a stop string is empty: leave it out")
        self._automaton = _automaton(tuple(sorted(set(strings))))
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece.

        Returns:
            The text that is certain by now, and the stop string that comes after it, if any. No
            more may be pushed after one.
        """
        automaton = self._automaton
        state = self._state
        if not state and automaton.first.isdisjoint(text):
            # Most pieces.
            return text, None
        begin, whole = len(self._held), self._held + text
        follow, retreat, endings = automaton.follow, automaton.retreat, automaton.endings
        for place, character in enumerate(text, begin + 1):
            while (after := follow[state].get(character)) is None and state:
                state = retreat[state]
            state = after or 0
            if endings[state]:
                self._held, self._state = "", 0
                return whole[: place - len(endings[state])], endings[state]
        keep = len(whole) - automaton.depth[state]
        self._held, self._state = whole[keep:], state
        return whole[:keep], None

    def take_held(self) -> str:
        """The text that is held back, at the end."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """That of Aho and Corasick. A state is the longest beginning of a string with which the text
    ends; state 0 is the empty one.

    Attributes:
        first: the characters with which the strings begin.
        follow: for each state, the one that each character leads to, where it goes on.
        retreat: for each state, the next shorter beginning of a string with which it ends.
        depth: its length.
        endings: the longest of the strings with which it ends; empty for none.
    """

    __slots__ = ("depth", "endings", "first", "follow", "retreat")

    def __init__(self, strings: Sequence[str]) -> None:
        self.follow: list[dict[str, int]] = [{}]
        self.retreat, self.depth, self.endings = [0], [0], [""]
        for string in strings:
            self._add(string)
        self.first = frozenset(self.follow[0])
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            after = self.follow[state].get(character)
            if after is None:
                after = self.follow[state][character] = len(self.follow)
                self.follow.append({})
                self.retreat.append(0)
                self.depth.append(self.depth[state] + 1)
                self.endings.append("")
            state = after
        self.endings[state] = string

    def _link(self) -> None:
        """Find where each state retreats to; shorter ones come first."""
        waiting = deque(self.follow[0].values())
        while waiting:
            state = waiting.popleft()
            shorter = self.retreat[state]
            # What ends with a string within another one is complete before that.
            self.endings[state] = self.endings[state] or self.endings[shorter]
            for character, after in self.follow[state].items():
                back = shorter
                while (following := self.follow[back].get(character)) is None and back:
                    back = self.retreat[back]
                self.retreat[after] = following or 0
                waiting.append(after)


@lru_cache(maxsize=_KEPT)
def _automaton(strings: tuple[str, ...]) -> _Automaton:
    return _Automaton(strings)
