"""The flight of a namespace: what its processes saw and decided, as they record it."""

from .flight_file import FlightFile, FlightHead, read_flight, write_flight
from .recorder import FlightRecorder
from .records import Entry, flight_stream, flight_subject

__all__ = [
    "Entry",
    "FlightFile",
    "FlightHead",
    "FlightRecorder",
    "flight_stream",
    "flight_subject",
    "read_flight",
    "write_flight",
]
