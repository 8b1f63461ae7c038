"""The status of a process: texts for people, shown by `dynbus ps`, `$SRV.STATS` and `/ready`, and
figures of single instances, shown by `dynbus top`.
"""

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
        # By source, each with what it is about.
        self._fields: dict[str, tuple[str, Mapping[str, str]]] = {}
        self._figures: dict[str, tuple[str, Mapping[str, float]]] = {}
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
            self._fields[source] = about, {k: text[:MAX_TEXT] for k, text in fields.items()}

    def put_figures(self, source: str, instance: str, figures: Mapping[str, float]) -> None:
        """Replace the figures that a source gives of an instance.

        Args:
            source: as `put` takes it; `remove` removes both.
            instance: `namespace.component@instance`.
            figures: counters, or values as they are now, by names that say which.
        """
        with self._lock:
            self._figures[source] = instance, dict(figures)

    def figures(self, instance: str) -> dict[str, float]:
        """All figures of an instance; those of several sources add up."""
        found: dict[str, float] = {}
        with self._lock:
            for about, figures in self._figures.values():
                if about == instance:
                    for key, value in figures.items():
                        found[key] = found.get(key, 0) + value
        return found

    def remove(self, source: str) -> None:
        """A source says nothing any longer."""
        with self._lock:
            self._fields.pop(source, None)
            self._figures.pop(source, None)

    def read(self, speaker: str = "") -> dict[str, str]:
        """All keys with their texts, of several that differ each with what it is about.

        Args:
            speaker: `namespace.component` of the instance that shows it. What is about that
                component is said by those who call it, and left out.
        """
        with self._lock:
            said = [each for each in self._fields.values() if each[0] != speaker]
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
