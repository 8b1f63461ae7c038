"""The exit codes of the `dynbus` command. `docs/` and every `--help` quote these."""

from __future__ import annotations

from typing import Final

from .errors import DynbusError

OK: Final = 0
FAILURE: Final = 1
USAGE: Final = 2
CONFIG_ERROR: Final = 3
NO_SERVER: Final = 4
START_FAILED: Final = 5
ESCALATED: Final = 6
INTERRUPTED: Final = 130
READER_GONE: Final = 141
TERMINATED: Final = 143

CALL_CODES: Final[dict[str, int]] = {
    "HandlerError": 10,
    "NoInstances": 11,
    "Unavailable": 12,
    "Overloaded": 13,
    "DeadlineExceeded": 14,
    "Cancelled": 15,
    "InvalidRequest": 16,
    "InvalidResponse": 17,
    "PermissionDenied": 18,
    "PayloadTooLarge": 19,
    "StreamLost": 20,
    "UnknownOutcome": 21,
    "Draining": 22,
    "ReaderStalled": 23,
    "ResumeMismatch": 24,
    "Migrate": 25,
    "ConfigError": CONFIG_ERROR,
}
"""The exit code of a failed call, by its error code; every other error is `FAILURE`."""

GENERAL: Final = (
    "Exit codes: 0 well, 1 failure, 2 wrong usage, 3 wrong configuration, 4 no server, "
    "130 stopped by Ctrl-C, 141 the reader of the output went away, 143 stopped by SIGTERM."
)

RUN: Final = (
    "Exit codes: 0 stopped after a drain, 1 failure, 2 wrong usage, 3 wrong configuration, "
    "4 no server, 5 an actor did not start, 6 an instance whose on_crash is escalate ended, "
    "130 stopped at once."
)

CALL: Final = (
    "Exit codes: 0 well, 1 failure, 2 wrong usage, 4 no server, 130 Ctrl-C, 141 the reader of "
    "the output went away, 143 SIGTERM, and "
    + ", ".join(f"{code} {name}" for name, code in CALL_CODES.items())
    + "."
)


def call_exit_code(error: DynbusError) -> int:
    """The exit code of a call that ended in `error`."""
    return CALL_CODES.get(error.code, FAILURE)


def exit_code(error: DynbusError) -> int:
    """The exit code of a command other than a call that ended in `error`."""
    known = {"ConfigError": CONFIG_ERROR, "Unavailable": NO_SERVER, "PermissionDenied": NO_SERVER}
    return known.get(error.code, FAILURE)
