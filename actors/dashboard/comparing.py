"""`Comparison`: what is on record beside what other settings would have made of it, over time.

Both are made by the parts of a replay, the one without the settings and the other with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from dynbus.actors.commands.recording import ENTRY_POINTS

if TYPE_CHECKING:
    from dynbus.actors.commands.recording import ReplayPart
    from dynbus.bus.flight import Entry

    MakeParts = Callable[[Mapping[str, str]], Sequence[ReplayPart]]

SAMPLES: Final = 120
"""Moments at which the load is looked at."""
MOST_PLACES: Final = 64
"""Instances whose load is kept; those that come later are left out."""


def replay_parts(settings: Mapping[str, str]) -> list[ReplayPart]:
    """All parts of a flight that are run again, with other settings than those on record.

    Raises:
        ConfigError: one is none, or has no such value.
    """
    return [one.load()(settings, "") for one in metadata.entry_points(group=ENTRY_POINTS)]


class _Run:
    """A replay, and the load of each place at the moments so far."""

    def __init__(self, parts: Sequence[ReplayPart]) -> None:
        self.parts = parts
        self.load: dict[str, list[float]] = {}
        self._samples = 0

    def sample(self) -> None:
        for part in self.parts:
            for place, load in part.load().items():
                if place not in self.load and len(self.load) < MOST_PLACES:
                    self.load[place] = [0.0] * self._samples
                if place in self.load and len(self.load[place]) == self._samples:
                    self.load[place].append(load)
        self._samples += 1
        for loads in self.load.values():
            if len(loads) < self._samples:
                loads.append(0.0)

    def to_json(self) -> dict[str, Any]:
        return {
            "load": dict(sorted(self.load.items())),
            "parts": {part.title: part.to_json() for part in self.parts},
        }


class Comparison:
    """Takes a flight twice, as it is and with other settings.

    Args:
        settings: as of `dynbus replay --set`.
        since, until: Unix seconds between which the load is looked at.
        make: the parts of a replay.

    Raises:
        ConfigError: a setting is none, or has no such value.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        since: float,
        until: float,
        make: MakeParts = replay_parts,
    ) -> None:
        self._settings = dict(settings)
        self._recorded, self._replayed = _Run(make({})), _Run(make(settings))
        self._since = since
        self._width = max(until - since, 1e-3) / SAMPLES
        self._samples = 0

    def __repr__(self) -> str:
        return f"<Comparison with {self._settings} [{self.progress:.0%}]>"

    @property
    def progress(self) -> float:
        """The part of the time that was taken."""
        return self._samples / SAMPLES

    def take(self, entry: Entry) -> None:
        """Take the next record."""
        self._sample_until(entry.time)
        for run in (self._recorded, self._replayed):
            for part in run.parts:
                part.take(entry)

    def _sample_until(self, time: float) -> None:
        """Look at the load at each moment that comes before a time."""
        while self._samples < SAMPLES and self._since + (self._samples + 1) * self._width <= time:
            self._recorded.sample()
            self._replayed.sample()
            self._samples += 1

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain values, once all is taken: the load of each place at the end of
        each of the parts of the time, and what the replays say."""
        self._sample_until(self._since + (SAMPLES + 1) * self._width)
        return {
            "settings": self._settings,
            "since": self._since,
            "width": self._width,
            "recorded": self._recorded.to_json(),
            "replayed": self._replayed.to_json(),
        }


def compare(
    comparison: Comparison, entries: Iterable[Entry], should_stop: Callable[[], bool]
) -> dict[str, Any] | None:
    """The outcome of a comparison for these records; None where it was to stop before."""
    for entry in entries:
        if should_stop():
            return None
        comparison.take(entry)
    return comparison.to_json()
