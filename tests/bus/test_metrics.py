"""Labels are bounded, and counters count from every thread."""

from __future__ import annotations

import asyncio
import threading

import pytest
from opentelemetry.metrics import CallbackOptions
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from dynbus.bus.errors import ERRORS, Cancelled, DynbusError, Unavailable
from dynbus.bus.telemetry.metrics import (
    OTHER,
    SECONDS,
    Metrics,
    Tally,
    error_code,
)
from dynbus.bus.transport import NoStream

LABELS = (("side", "server"),)


class OfAUser(DynbusError):
    code = "OfAUser"


@pytest.mark.parametrize(
    ("error", "side", "code"),
    [
        (Unavailable("x"), "client", "Unavailable"),
        (Cancelled("x"), "server", "Cancelled"),
        (DynbusError("x"), "client", "DynbusError"),
        (OfAUser("x"), "server", OTHER),
        (NoStream("x"), "client", OTHER),
        (asyncio.CancelledError(), "client", "Cancelled"),
        (asyncio.CancelledError(), "server", "Cancelled"),
        (GeneratorExit(), "server", "Cancelled"),
        (ValueError("x"), "server", "HandlerError"),
        (ValueError("x"), "client", OTHER),
        (KeyboardInterrupt(), "server", OTHER),
    ],
)
def test_an_error_has_a_bounded_code(error: BaseException, side: str, code: str) -> None:
    assert error_code(error, side) == code
    assert code in ERRORS or code == OTHER


def counted(tally: Tally) -> list[tuple[float, dict[str, object]]]:
    return [
        (observation.value, dict(observation.attributes or {}))
        for observation in tally.observe(CallbackOptions())
    ]


def test_a_tally_counts_by_labels_up_and_down() -> None:
    tally = Tally()

    tally.add(LABELS)
    tally.add(LABELS, 5)
    tally.add((), 2)
    tally.add((), -2)

    assert counted(tally) == [(6, {"side": "server"}), (0, {})]


def test_a_tally_that_was_never_added_to_has_nothing_to_say() -> None:
    assert counted(Tally()) == []


def test_a_tally_loses_nothing_between_threads() -> None:
    tally = Tally()

    def add() -> None:
        for number in range(5000):
            tally.add((("n", str(number % 3)),))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        counted(tally)
        thread.join()

    assert sum(value for value, _ in counted(tally)) == 20_000


def test_every_instrument_has_its_name_unit_and_bounds() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    metrics = Metrics(provider)

    for tally in (
        metrics.calls,
        metrics.items,
        metrics.cancellations,
        metrics.reconnects,
        metrics.hangs,
        metrics.drops,
        metrics.in_flight,
    ):
        tally.add(LABELS)
    for histogram in (
        metrics.duration,
        metrics.first_item,
        metrics.credit_stall,
        metrics.batch_size,
        metrics.batch_wait,
        metrics.batch_padding,
    ):
        histogram.record(0.003)

    data = reader.get_metrics_data()
    assert data is not None
    found = {
        metric.name: metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert {name: metric.unit for name, metric in found.items()} == {
        "dynbus.calls": "{call}",
        "dynbus.calls.in_flight": "{call}",
        "dynbus.stream.items": "{item}",
        "dynbus.cancellations": "{call}",
        "dynbus.hangs": "{hang}",
        "dynbus.reconnects": "{reconnect}",
        "dynbus.drops": "{message}",
        "dynbus.call.duration": "s",
        "dynbus.call.time_to_first_item": "s",
        "dynbus.credit.stall.duration": "s",
        "dynbus.batch.size": "{call}",
        "dynbus.batch.wait.duration": "s",
        "dynbus.batch.padding": "1",
    }
    assert all(metric.description for metric in found.values())
    (point,) = found["dynbus.call.duration"].data.data_points
    assert tuple(point.explicit_bounds) == SECONDS  # type: ignore[union-attr]


def test_the_bounds_ascend() -> None:
    assert list(SECONDS) == sorted(set(SECONDS))


def test_readings_of_several_sources_are_combined_and_go_with_them() -> None:
    metrics = Metrics(MeterProvider(shutdown_on_exit=False))
    total = metrics.gauge("test.total", "1", "Adds up.")
    worst = metrics.gauge("test.worst", "s", "Does not.", max)

    for readings in (total, worst):
        readings.put("one", {LABELS: 2.0})
        readings.put("two", {LABELS: 3.0})

    assert [observation.value for observation in total.observe(CallbackOptions())] == [5.0]
    assert [observation.value for observation in worst.observe(CallbackOptions())] == [3.0]
    total.remove("two")
    assert [observation.value for observation in total.observe(CallbackOptions())] == [2.0]
    assert metrics.gauge("test.total", "1", "Adds up.") is total


def test_what_a_source_has_counted_stays_when_it_is_gone() -> None:
    counter = Metrics(MeterProvider(shutdown_on_exit=False)).counter("test.count", "1", "Counts.")
    counter.put("one", {LABELS: 2})
    counter.put("two", {LABELS: 3})

    counter.remove("two")
    counter.put("one", {LABELS: 4})

    assert [observation.value for observation in counter.observe(CallbackOptions())] == [7]


def test_what_is_followed_is_read_at_each_export_until_that_is_ended() -> None:
    gauge = Metrics(MeterProvider(shutdown_on_exit=False)).gauge("test.left", "s", "Runs.", min)
    left = 3.0
    gauge.put("put", {LABELS: 5.0})
    end = gauge.follow(lambda: {LABELS: left})

    assert [observation.value for observation in gauge.observe(CallbackOptions())] == [3.0]
    left = 2.0
    assert [observation.value for observation in gauge.observe(CallbackOptions())] == [2.0]
    end()
    assert [observation.value for observation in gauge.observe(CallbackOptions())] == [5.0]
