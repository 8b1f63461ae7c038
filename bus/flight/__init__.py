"""The flight of a namespace: what its processes saw and decided, as they record it."""

from .events import EVENT, Event, FlightEvents, decode_event, digest_of_request
from .flight_file import FlightFile, FlightHead, read_flight, write_flight
from .recorder import FlightRecorder
from .records import Entry, decode_message, flight_stream, flight_subject

__all__ = [
    "EVENT",
    "Entry",
    "Event",
    "FlightEvents",
    "FlightFile",
    "FlightHead",
    "FlightRecorder",
    "decode_event",
    "decode_message",
    "digest_of_request",
    "flight_stream",
    "flight_subject",
    "read_flight",
    "write_flight",
]
