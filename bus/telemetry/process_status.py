"""What a process says of how it is, for people: shown by `dynbus ps`, `$SRV.STATS` and `/ready`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

MAX_TEXT: Final = 300
"""Characters of a text: all of them are in each answer of each instance."""


class ProcessStatus:
    """Short texts by key, from any number of sources; safe to use from several threads.

    The texts are put there, not asked for, so that they can be read while the main loop is
    blocked.
    """

    def __init__(self) -> None:
        self._fields: dict[str, Mapping[str, str]] = {}
        self._of: dict[str, str] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ProcessStatus {self.read()}>"

    def put(self, source: str, about: str, fields: Mapping[str, str]) -> None:
        """Replace what a source says.

        Args:
            source: names whoever says it, nobody else in this process.
            about: the component that it is about, `namespace.component`. It tells the sources
                apart where several say something different.
        """
        with self._lock:
            self._fields[source] = {key: text[:MAX_TEXT] for key, text in fields.items()}
            self._of[source] = about

    def remove(self, source: str) -> None:
        """A source says nothing any longer."""
        with self._lock:
            self._fields.pop(source, None)
            self._of.pop(source, None)

    def read(self, speaker: str = "") -> dict[str, str]:
        """All keys with their texts, of several that differ each with what it is about.

        Args:
            speaker: `namespace.component` of the instance that shows it. What is about that
                component is said by those who call it, and left out.
        """
        with self._lock:
            said = [
                (about, self._fields[source])
                for source, about in self._of.items()
                if about != speaker
            ]
        found: dict[str, list[tuple[str, str]]] = {}
        for about, fields in said:
            for key, text in fields.items():
                found.setdefault(key, []).append((about, text))
        return {
            key: texts[0][1]
            if len({text for _, text in texts}) == 1
            else ", ".join(f"{about}: {text}" for about, text in texts)[:MAX_TEXT]
            for key, texts in sorted(found.items())
        }
