"""Flights as tests read them."""

from __future__ import annotations

import msgspec

from dynbus.bus.flight import EVENT, decode_event, flight_stream
from dynbus.bus.flight.records import Entry, Event, decode_message, entries_of
from dynbus.bus.memory.bus import MemoryBus


class ListedRecords:
    """A recorder that keeps its records.

    Attributes:
        one_in: requests of which one is recorded, a power of two.
    """

    def __init__(self) -> None:
        self.records: list[tuple[float, msgspec.Struct]] = []
        self.one_in = 1

    def note(self, record: msgspec.Struct, at: float) -> None:
        self.records.append((at, record))

    def share(self, digest: int) -> int:
        return 0 if digest & (self.one_in - 1) else self.one_in


async def entries_on(bus: MemoryBus, namespace: str) -> list[Entry]:
    """All that is on record of a namespace, in the order of time."""
    connection = await bus.connect(name="reader")
    try:
        stored = await connection.jetstream.read(flight_stream(namespace).name)
    finally:
        await connection.close()
    messages = [message for one in stored if (message := decode_message(one.data)) is not None]
    return sorted(entries_of(messages), key=lambda entry: entry.time)


async def events_on(bus: MemoryBus, namespace: str) -> list[Event]:
    """All events of a namespace, in the order of time."""
    entries = await entries_on(bus, namespace)
    return [decode_event(entry.body) for entry in entries if entry.kind == EVENT]
