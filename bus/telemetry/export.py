"""The log of exports that fail: one line each, with the reason and the setting that turns them off.

OpenTelemetry's exporters log each attempt. With a receiver that is down, or takes traces and no
metrics, they fill the log of a process that is well. `ExportState` decides what is said and when
the next attempt is due; `watch` has an exporter follow it.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
import time
from typing import Any, Final

from .logs import redact_url

FIRST_PAUSE: Final = 60.0
LONGEST_PAUSE: Final = 900.0
"""Seconds without an attempt at a receiver that does not take a signal."""
MAX_REASON: Final = 300
MAX_KINDS: Final = 100
"""Kinds of records that are remembered as said."""
LOGGERS: Final = ("opentelemetry.exporter", "opentelemetry.sdk")

_NOT_TAKEN: Final = re.compile(r"\bUNIMPLEMENTED\b|\bcode: (?:404|405|501)\b")
"""The texts by which an exporter says that the receiver has no such service."""

logger = logging.getLogger(__name__)


class ExportState:
    """The success of the exports of one signal. Times are seconds of one clock.

    Args:
        signal: `traces` or `metrics`.
    """

    def __init__(self, signal: str) -> None:
        self.signal = signal
        self._failures = 0
        self._refused = False
        self._pause = 0.0
        self._due_at = 0.0

    def is_due(self, now: float) -> bool:
        """True if an export is to be tried now."""
        return now >= self._due_at

    def failed(self, now: float, reason: str) -> str:
        """An attempt failed; returns what to say, which is nothing when it was said already.

        A receiver that does not know the signal is asked ever more seldom. One that is down is
        not: what it would miss is lost.

        Args:
            reason: empty where the exporter says nothing, as it does when it repeats itself.
        """
        self._failures += 1
        if reason:
            self._refused = _NOT_TAKEN.search(reason) is not None
        self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE) if self._refused else 0.0
        self._due_at = now + self._pause
        if self._failures > 1:
            return ""
        what = "the receiver takes no" if self._refused else "nobody takes the"
        return (
            f"{what} {self.signal} ({reason[:MAX_REASON] or 'no reason is told'}). They are "
            "dropped, and nothing more is said until that changes; "
            f"OTEL_{self.signal.upper()}_EXPORTER=none turns {self.signal} off"
        )

    def succeeded(self) -> str:
        """An attempt succeeded; returns what to say."""
        failures = self._failures
        self._failures, self._refused, self._pause, self._due_at = 0, False, 0.0, 0.0
        return f"{self.signal} are taken again, after {failures} failures" if failures else ""


class _ExportLog(logging.Handler):
    """Takes what OpenTelemetry logs: of an attempt the reason, of all else each kind once."""

    def __init__(self) -> None:
        super().__init__()
        self._attempt = threading.local()
        self._said: set[tuple[str, str]] = set()

    def begin(self) -> None:
        """An attempt begins on this thread."""
        self._attempt.reasons = []

    def finish(self) -> str:
        """It has ended; returns what was logged first in it, which names the cause."""
        reasons: list[str] = self._attempt.reasons
        self._attempt.reasons = None
        return reasons[0] if reasons else ""

    def forget(self) -> None:
        """Let all be said again."""
        self._said.clear()

    def emit(self, record: logging.LogRecord) -> None:
        reasons: list[str] | None = getattr(self._attempt, "reasons", None)
        if reasons is not None:
            if record.levelno >= logging.WARNING:
                reasons.append(redact_url(record.getMessage()))
            return
        kind = record.name, str(record.msg)
        if record.levelno >= logging.WARNING:
            if kind in self._said or len(self._said) >= MAX_KINDS:
                return
            self._said.add(kind)
        logging.getLogger("opentelemetry").handle(record)


_log = _ExportLog()


def watch(exporter: Any, signal: str) -> None:
    """Have an exporter of OpenTelemetry's SDK say once that it fails, and once that it works."""
    for name in LOGGERS:
        theirs = logging.getLogger(name)
        if _log not in theirs.handlers:
            theirs.addHandler(_log)
            theirs.propagate = False
    state = ExportState(signal)
    export = exporter.export
    last_failure: Any = None

    def failed(reason: str) -> None:
        text = state.failed(time.monotonic(), reason)
        if text:
            logger.warning("%s", text)

    @functools.wraps(export)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal last_failure
        if not state.is_due(time.monotonic()):
            return last_failure
        _log.begin()
        try:
            result = export(*args, **kwargs)
        except Exception as error:
            failed(_log.finish() or repr(error))
            raise
        reason = _log.finish()
        if result.name != "SUCCESS":
            last_failure = result
            failed(reason)
        elif text := state.succeeded():
            _log.forget()
            logger.info("%s", text)
        return result

    # Not an object around it: readers of metrics look at more than its methods.
    exporter.export = watched
