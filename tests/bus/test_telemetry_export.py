"""Exports that fail are told once, and a receiver that does not know a signal is left alone."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.telemetry import export as telemetry_export
from dynbus.bus.telemetry.export import FIRST_PAUSE, LOGGERS, LONGEST_PAUSE, ExportState, watch

REFUSALS = [
    "Failed to export metrics to c:4317, error code: StatusCode.UNIMPLEMENTED, error details: ",
    "Failed to export metrics batch code: 404, reason: Not Found",
]
DOWN = "Transient error StatusCode.UNAVAILABLE encountered while exporting metrics to c:4317"


@pytest.mark.parametrize("reason", [*REFUSALS, DOWN, ""])
def test_a_failure_is_told_once_and_its_end_too(reason: str) -> None:
    state = ExportState("metrics")

    told = [state.failed(float(now), reason) for now in range(5)]

    assert told[1:] == [""] * 4
    assert (reason or "no reason is told") in told[0]
    assert "OTEL_METRICS_EXPORTER=none turns metrics off" in told[0]
    assert state.succeeded() == "metrics are taken again, after 5 failures"
    assert state.succeeded() == ""
    assert state.failed(9.0, reason) == told[0]


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_receiver_that_does_not_know_the_signal_is_asked_ever_more_seldom(reason: str) -> None:
    state = ExportState("metrics")
    now, pauses = 0.0, list[float]()

    for attempt in range(6):
        # An exporter that repeats itself says nothing for a while.
        state.failed(now, reason if attempt == 0 else "")
        begun = now
        while not state.is_due(now):
            now += 1.0
        pauses.append(now - begun)

    assert pauses == [60.0, 120.0, 240.0, 480.0, 900.0, 900.0]
    assert (pauses[0], pauses[-1]) == (FIRST_PAUSE, LONGEST_PAUSE)


def test_a_receiver_that_is_down_is_asked_each_time() -> None:
    state = ExportState("traces")

    state.failed(0.0, DOWN)

    assert state.is_due(0.0)


@given(st.lists(st.sampled_from([*REFUSALS, DOWN, "", None])))
def test_no_two_lines_in_a_row_say_the_same(outcomes: list[str | None]) -> None:
    state = ExportState("traces")

    told = [
        state.succeeded() if reason is None else state.failed(0.0, reason) for reason in outcomes
    ]

    kinds = ["again" in line for line in told if line]
    assert all(one != other for one, other in zip(kinds, kinds[1:], strict=False))


class Result(enum.Enum):
    SUCCESS = 0
    FAILURE = 1


class Exporter:
    """An exporter that logs as OpenTelemetry's do."""

    def __init__(self) -> None:
        self.attempts = 0
        self.text = DOWN
        self.result = Result.FAILURE
        self.error: Exception | None = None
        self.log = logging.getLogger("opentelemetry.exporter.test")

    def export(self, batch: str) -> Result:
        self.attempts += 1
        if self.text:
            self.log.warning(self.text)
        if self.error is not None:
            raise self.error
        return self.result


class Log(logging.Handler):
    """What reaches the root logger; pytest's own log has also what does not."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def log() -> Iterator[Log]:
    handler, root = Log(), logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    """An exporter that is watched."""
    exporter = Exporter()
    watch(exporter, "traces")
    try:
        yield exporter
    finally:
        for name in LOGGERS:
            theirs = logging.getLogger(name)
            theirs.handlers.clear()
            theirs.propagate = True


def test_attempts_that_fail_and_then_succeed_are_two_lines(exporter: Exporter, log: Log) -> None:
    results = [exporter.export("batch") for _ in range(3)]
    exporter.result = Result.SUCCESS
    results.append(exporter.export("batch"))

    assert [result.name for result in results] == ["FAILURE"] * 3 + ["SUCCESS"]
    assert [(record.levelname, record.name) for record in log.records] == [
        ("WARNING", telemetry_export.__name__),
        ("INFO", telemetry_export.__name__),
    ]
    assert DOWN in log.messages[0]


def test_a_receiver_that_refuses_is_not_asked_again_at_once(exporter: Exporter) -> None:
    exporter.text = REFUSALS[0]

    results = [exporter.export("batch") for _ in range(3)]

    assert exporter.attempts == 1
    assert results == [Result.FAILURE] * 3


def test_an_exporter_that_raises_has_failed(exporter: Exporter, log: Log) -> None:
    exporter.text, exporter.error = "", KeyError("no such thing")

    for _ in range(2):
        with pytest.raises(KeyError):
            exporter.export("batch")

    (message,) = log.messages
    assert "KeyError('no such thing')" in message


def test_what_is_logged_outside_of_attempts_is_passed_on_once_until_all_is_well(
    exporter: Exporter, log: Log
) -> None:
    for _ in range(3):
        logging.getLogger("opentelemetry.sdk.trace").warning("Queue full, dropping %s.", "spans")
    exporter.export("batch")
    exporter.result = Result.SUCCESS
    exporter.export("batch")
    logging.getLogger("opentelemetry.sdk.trace").warning("Queue full, dropping %s.", "spans")

    assert log.messages.count("Queue full, dropping spans.") == 2
