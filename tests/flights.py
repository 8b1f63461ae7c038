"""Flights as tests read them."""

from __future__ import annotations

from dynbus.bus.flight import EVENT, decode_event, flight_stream
from dynbus.bus.flight.events import Event
from dynbus.bus.flight.records import decode_message, entries_of
from dynbus.bus.memory.bus import MemoryBus


async def events_on(bus: MemoryBus, namespace: str) -> list[Event]:
    """All events of a namespace, in the order of time."""
    connection = await bus.connect(name="reader")
    try:
        stored = await connection.jetstream.read(flight_stream(namespace).name)
    finally:
        await connection.close()
    messages = [message for one in stored if (message := decode_message(one.data)) is not None]
    entries = sorted(entries_of(messages), key=lambda entry: entry.time)
    return [decode_event(entry.body) for entry in entries if entry.kind == EVENT]
