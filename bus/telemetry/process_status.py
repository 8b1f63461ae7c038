"""The status of a process: texts for people, shown by `dynbus ps`, `$SRV.STATS` and `/ready`,
figures of single instances, shown by `dynbus ps --watch`, and its start, shown by `dynbus run`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

logger = logging.getLogger(__name__)

MAX_TEXT: Final = 300
"""Characters of a text: all of them are in each answer of each instance."""


class StartStep(NamedTuple):
    """The progress of one thing that a process does before it serves.

    Attributes:
        what: it does, for people, such as `downloading smollm2`.
        done, total: in any unit, such as bytes; 0 in both where it is not known.
    """

    what: str
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        return f"{self.what} ({self.done / self.total:.0%})" if self.total else self.what


def _log(line: str, details: str) -> None:
    logger.info("%s", line)


class ProcessStatus:
    """Short texts by key, from any number of sources; safe to use from several threads.

    The texts are put there, not asked for, so that they can be read while the main loop is
    blocked.

    Attributes:
        announcer: carries out `announce`; it logs the line unless a command prints it.
    """

    def __init__(self) -> None:
        self.announcer: Callable[[str, str], object] = _log
        self._steps: dict[str, StartStep] = {}
        # By source, each with what it is about.
        self._fields: dict[str, tuple[str, Mapping[str, str]]] = {}
        self._figures: dict[str, tuple[str, Mapping[str, float]]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ProcessStatus {self.read()}>"

    def put(self, source: str, about: str, fields: Mapping[str, str]) -> None:
        """Replace what a source says.

        Args:
            source: names the part that says it, no other in this process.
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
        totals: dict[str, float] = {}
        with self._lock:
            for about, figures in self._figures.values():
                if about == instance:
                    for key, value in figures.items():
                        totals[key] = totals.get(key, 0) + value
        return totals

    def put_step(self, source: str, what: str, done: int = 0, total: int = 0) -> None:
        """Say how far a source is in its start; it is over when `remove` is called.

        Args:
            what, done, total: see `StartStep`.
        """
        with self._lock:
            self._steps[source] = StartStep(what[:MAX_TEXT], done, total)

    def steps(self) -> list[StartStep]:
        """The progress of each source in its start."""
        with self._lock:
            return list(self._steps.values())

    def announce(self, line: str, details: str = "") -> None:
        """Have people read something, once.

        Args:
            details: several lines, for people at a terminal.
        """
        self.announcer(line, details)

    def remove(self, source: str) -> None:
        """A source says nothing any longer."""
        with self._lock:
            self._fields.pop(source, None)
            self._figures.pop(source, None)
            self._steps.pop(source, None)

    def read(self, speaker: str = "") -> dict[str, str]:
        """All keys with their texts, of several that differ each with what it is about.

        Args:
            speaker: `namespace.component` of the instance that shows it. What is about that
                component is said by those who call it, and left out.
        """
        with self._lock:
            said = [each for each in self._fields.values() if each[0] != speaker]
        texts_of: dict[str, list[tuple[str, str]]] = {}
        for about, fields in said:
            for key, text in fields.items():
                texts_of.setdefault(key, []).append((about, text))
        return {
            key: texts[0][1]
            if len({text for _, text in texts}) == 1
            else ", ".join(f"{about}: {text}" for about, text in texts)[:MAX_TEXT]
            for key, texts in sorted(texts_of.items())
        }
