"""The instruments of dynbus, and the closed lists that keep their labels bounded.

Counters are plain integers that are read when metrics are exported; only what needs a
distribution is recorded through the SDK call by call.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from dynbus.bus.errors import ERRORS, DynbusError

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation

OTHER: Final = "_OTHER"
"""The label of whatever is not in a bounded list: OpenTelemetry's own fallback value."""

SECONDS: Final = (
    0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
    0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
"""Bucket bounds of the histograms: from a local unary call to a long stream."""

CALLS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SHARES: Final = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Bucket bounds of those of batches."""

Labels = tuple[tuple[str, str], ...]
"""The attributes of a measurement, in a form that can be a key."""


def error_code(error: BaseException, side: str) -> str:
    """The `error.type` of a failed call: an error code, or `_OTHER`; never anything unbounded."""
    if isinstance(error, DynbusError):
        return error.code if error.code in ERRORS else OTHER
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "Cancelled"
    return "HandlerError" if side == "server" and isinstance(error, Exception) else OTHER


class Tally:
    """A counter that costs next to nothing to add to.

    The SDK's own counters take 7 us for each addition, which is a good part of a call.
    """

    def __init__(self) -> None:
        self._counts: dict[Labels, int] = {}
        self._lock = threading.Lock()  # the control thread adds too

    def add(self, labels: Labels, amount: int = 1) -> None:
        with self._lock:
            self._counts[labels] = self._counts.get(labels, 0) + amount

    def observe(self, options: CallbackOptions) -> Iterable[Observation]:
        """The observations that the SDK reads at each export."""
        from opentelemetry.metrics import Observation

        with self._lock:
            counts = list(self._counts.items())
        return [Observation(count, dict(labels)) for labels, count in counts]


class Readings:
    """Values that are put here when they change, and read at each export.

    Values of several sources that have the same labels are combined.

    Args:
        combine: `sum`, or `max` for what does not add up.
        lasting: whether what a source counted stays when it is gone, as of a counter.
    """

    def __init__(self, combine: Callable[[Iterable[float]], float], *, lasting: bool) -> None:
        self._combine = combine
        self.lasting = lasting
        self._values: dict[str, dict[Labels, float]] = {}
        self._followed: dict[int, Callable[[], Mapping[Labels, float]]] = {}
        self._numbers = itertools.count()
        self._gone: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def put(self, source: str, values: Mapping[Labels, float]) -> None:
        """Replace all that a source has."""
        with self._lock:
            self._values[source] = dict(values)

    def remove(self, source: str) -> None:
        """A source is gone."""
        with self._lock:
            last = self._values.pop(source, {})
            if self.lasting:
                for labels, value in last.items():
                    self._gone[labels] = self._gone.get(labels, 0) + value

    def follow(self, read: Callable[[], Mapping[Labels, float]]) -> Callable[[], None]:
        """Have `read()` called at each export, on the exporter's thread; what is returned ends
        that."""
        number = next(self._numbers)
        with self._lock:
            self._followed[number] = read

        def end() -> None:
            with self._lock:
                self._followed.pop(number, None)

        return end

    def observe(self, options: CallbackOptions) -> Iterable[Observation]:
        """The observations that the SDK reads at each export."""
        from opentelemetry.metrics import Observation

        together: dict[Labels, list[float]] = {}
        with self._lock:
            followed = list(self._followed.values())
            sources = [dict(self._gone), *(dict(values) for values in self._values.values())]
        for values in (*sources, *(read() for read in followed)):
            for labels, value in values.items():
                together.setdefault(labels, []).append(value)
        return [
            Observation(self._combine(values), dict(labels)) for labels, values in together.items()
        ]


class Metrics:
    """Every instrument of dynbus; one object per meter provider, which refuses doubles."""

    def __init__(self, provider: MeterProvider) -> None:
        meter = self._meter = provider.get_meter("dynbus")
        self._readings: dict[str, Readings] = {}
        self._histograms: dict[str, Histogram] = {}
        self._tallies: dict[str, Tally] = {}
        tally = self.tally
        self.calls = tally("calls", "{call}", "Calls that have ended.")
        self.items = tally("stream.items", "{item}", "Items of streams.")
        self.cancellations = tally("cancellations", "{call}", "Calls told to stop or killed.")
        self.migrations = tally(
            "migrations", "{migration}", "Times a call went on at another instance."
        )
        self.reconnects = tally("reconnects", "{reconnect}", "Times a connection came back.")
        self.hangs = tally("hangs", "{hang}", "Instances that hung and were withdrawn.")
        self.drops = tally("drops", "{message}", "Messages dropped unanswered.")
        self.connections = self.gauge(
            "connections", "{connection}", "Connections to servers, by what they are at."
        )
        self.round_trip = self.gauge(
            "connection.round_trip", "s", "Seconds of the last ping that was answered.", max
        )
        self.unsent = self.gauge(
            "connection.unsent", "By", "Bytes published that the operating system has not taken."
        )
        self.lease = self.gauge(
            "lease.remaining", "s", "Seconds for which records of instances last, the least.", min
        )
        self.in_flight = Tally()
        meter.create_observable_up_down_counter(
            "dynbus.calls.in_flight",
            [self.in_flight.observe],
            unit="{call}",
            description="Calls that are running.",
        )
        self.waiting = Tally()
        meter.create_observable_up_down_counter(
            "dynbus.calls.waiting",
            [self.waiting.observe],
            unit="{call}",
            description="Calls that wait for an instance, at their callers.",
        )
        self.duration = self.histogram("call.duration", "Seconds from a call's start to its end.")
        self.first_item = self.histogram(
            "call.time_to_first_item", "Seconds to a stream's first item."
        )
        self.credit_stall = self.histogram(
            "credit.stall.duration", "Seconds a writer had no credit."
        )
        self.batch_size = self.histogram(
            "batch.size", "Calls of a batch.", unit="{call}", bounds=CALLS
        )
        self.batch_wait = self.histogram(
            "batch.wait.duration", "Seconds a call waited for its batch to begin."
        )
        self.batch_padding = self.histogram(
            "batch.padding",
            "Share of a batch that is padding when each request is as large as its largest.",
            unit="1",
            bounds=SHARES,
        )

    def tally(self, name: str, unit: str, text: str) -> Tally:
        """The counter `dynbus.{name}` that is added to, made once."""
        known = self._tallies.get(name)
        if known is None:
            known = self._tallies[name] = Tally()
            self._meter.create_observable_counter(
                f"dynbus.{name}", [known.observe], unit=unit, description=text
            )
        return known

    def histogram(
        self, name: str, text: str, *, unit: str = "s", bounds: Sequence[float] = SECONDS
    ) -> Histogram:
        """The histogram `dynbus.{name}`, of seconds unless given, made once."""
        known = self._histograms.get(name)
        if known is None:
            known = self._histograms[name] = self._meter.create_histogram(
                f"dynbus.{name}",
                unit=unit,
                description=text,
                explicit_bucket_boundaries_advisory=bounds,
            )
        return known

    def counter(self, name: str, unit: str, text: str) -> Readings:
        """The counter `dynbus.{name}` of another folder, made once."""
        return self._reading(name, unit, text, Readings(sum, lasting=True))

    def gauge(
        self,
        name: str,
        unit: str,
        text: str,
        combine: Callable[[Iterable[float]], float] = sum,
    ) -> Readings:
        """The gauge `dynbus.{name}` of another folder, made once; `combine` as of `Readings`."""
        return self._reading(name, unit, text, Readings(combine, lasting=False))

    def _reading(self, name: str, unit: str, text: str, new: Readings) -> Readings:
        known = self._readings.get(name)
        if known is not None:
            return known
        make = (
            self._meter.create_observable_counter
            if new.lasting
            else self._meter.create_observable_gauge
        )
        make(f"dynbus.{name}", [new.observe], unit=unit, description=text)
        self._readings[name] = new
        return new
