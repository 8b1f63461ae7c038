"""Logs, metrics, traces and health."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        get_server,
        health,
        held_requests,
        logs,
        metrics,
        process_status,
        recent_log,
        telemetry,
        trace_context,
    )

__all__ = [
    "get_server",
    "health",
    "held_requests",
    "logs",
    "metrics",
    "process_status",
    "recent_log",
    "telemetry",
    "trace_context",
]
