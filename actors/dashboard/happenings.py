"""Happenings of a flight: its records as events, whatever kind of part has recorded them.

The kernel reads its own events. What other parts record, such as the tapes of routers, they read
themselves, by an entry point.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

import msgspec

from dynbus.bus.flight import EVENT, decode_event

if TYPE_CHECKING:
    from dynbus.bus.flight import Entry

READERS: Final = "dynbus.happenings"
"""The group of classes, `RecordReader`s, each of which reads records of a kind of its own."""

MISSING: Final = "records.missing"
LONGEST: Final = 160
"""Letters of a text that is kept: a writer may send any, and thousands are kept."""
MOST_DETAILS: Final = 16

Value: TypeAlias = str | int | float | bool


class Happening(NamedTuple):
    """Something that happened.

    Attributes:
        time: Unix seconds.
        what: a word and what became of it, such as `instance.ready` or `route.sent`.
        who: the address of what it happened to.
        request: the digest of a request's id; empty where it is about none.
    """

    time: float
    what: str
    who: str
    request: str
    details: Mapping[str, Value]

    def number(self, name: str) -> float | None:
        """A detail that is a number, and finite; None for any other, or none."""
        value = self.details.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        # One that no float can hold is as little a measure as one that is infinite.
        return float(value) if -1e15 < value < 1e15 and math.isfinite(value) else None

    def text(self, name: str) -> str:
        """A detail that is a text; empty for any other, or none."""
        value = self.details.get(name)
        return value if isinstance(value, str) else ""


class RecordReader(Protocol):
    """Reads what a part has recorded, in the order of each recorder."""

    def take(self, entry: Entry) -> Iterable[tuple[float, str, str, str, Mapping[str, Value]]]:
        """The fields of the `Happening`s that the next record tells of; nothing for one of another
        kind."""
        ...


class FlightReader:
    """Reads the records of a flight as happenings.

    Args:
        readers: of what other parts record; those that are installed unless given.
    """

    def __init__(self, readers: Iterable[RecordReader] | None = None) -> None:
        if readers is None:
            readers = [one.load()() for one in metadata.entry_points(group=READERS)]
        self._readers = list(readers)

    def __repr__(self) -> str:
        return f"<FlightReader [{len(self._readers)} parts]>"

    def take(self, entry: Entry) -> Iterator[Happening]:
        """The happenings that the next record tells of."""
        missing = entry.missing
        if entry.kind == EVENT:
            try:
                event = decode_event(entry.body)
            except (msgspec.DecodeError, RecursionError):
                missing += 1
            else:
                yield _clipped(entry.time, event.what, event.who, event.request, event.details)
        else:
            for reader in self._readers:
                for happened in reader.take(entry):
                    yield _clipped(*happened)
        if missing:
            yield Happening(entry.time, MISSING, entry.recorder[:LONGEST], "", {"count": missing})


def _clipped(
    time: float, what: str, who: str, request: str, details: Mapping[str, Value]
) -> Happening:
    """A happening of bounded size."""
    if len(details) > MOST_DETAILS or any(
        len(name) > LONGEST or (isinstance(value, str) and len(value) > LONGEST)
        for name, value in details.items()
    ):
        details = {
            name[:LONGEST]: value[:LONGEST] if isinstance(value, str) else value
            for name, value in list(details.items())[:MOST_DETAILS]
        }
    return Happening(time, what[:LONGEST], who[:LONGEST], request[:LONGEST], details)
