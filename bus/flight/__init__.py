"""The flight of a namespace: what its processes saw and decided, as they record it."""

from .events import FlightEvents, digest_of_request
from .flight_file import FlightFile, FlightHead, read_flight, write_flight
from .recorder import FlightRecorder
from .records import (
    EVENT,
    FLIGHTS,
    Entry,
    EntryReader,
    Event,
    decode_event,
    decode_message,
    flight_stream,
    flight_subject,
    message_at,
    namespace_of_flight,
)
from .sampling import MOST_ONE_IN, SAMPLED, SampledTimes, Sampling

__all__ = [
    "EVENT",
    "FLIGHTS",
    "MOST_ONE_IN",
    "SAMPLED",
    "Entry",
    "EntryReader",
    "Event",
    "FlightEvents",
    "FlightFile",
    "FlightHead",
    "FlightRecorder",
    "SampledTimes",
    "Sampling",
    "decode_event",
    "decode_message",
    "digest_of_request",
    "flight_stream",
    "flight_subject",
    "message_at",
    "namespace_of_flight",
    "read_flight",
    "write_flight",
]
