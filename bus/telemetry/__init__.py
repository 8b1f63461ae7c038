"""Logs, metrics, traces and health."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import health, logs, metrics, process_status, recent_log, telemetry, trace_context

__all__ = [
    "health",
    "logs",
    "metrics",
    "process_status",
    "recent_log",
    "telemetry",
    "trace_context",
]
