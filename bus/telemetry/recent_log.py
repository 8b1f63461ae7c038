"""The last warnings and errors of this process, for somebody who looks at it from afar.

They leave the process, so they hold no texts of users' code: of a record's arguments numbers and
names are kept, of an exception its type, and of any other text the first word if that may be a
name.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from typing import Any, Final

import msgspec

from dynbus.bus.errors import safe_text

from .logs import redact_url

ROOT: Final = "dynbus"
MOST_RECORDS: Final = 100
MOST_TEXT: Final = 500
"""Characters of a message."""
OWN_TEXTS: Final = ("dynbus.bus.nats.", "dynbus.bus.records.")
"""Loggers whose arguments are dynbus's and the server's alone: the reason of a lost connection is
told whole."""


_NAME: Final = re.compile(r"[A-Za-z0-9_.:@/$*>=+-]{0,128}")


class RecentLog(logging.Handler):
    """The latest records at WARNING or above of the loggers below `dynbus`; safe to use from
    several threads."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._records: deque[dict[str, Any]] = deque(maxlen=MOST_RECORDS)

    def keep(self) -> None:
        """Keep what is logged from now on; more calls change nothing."""
        logging.getLogger(ROOT).addHandler(self)

    def read(self, most: int, size: int) -> list[dict[str, Any]]:
        """The latest records, oldest first.

        Args:
            most: how many.
            size: bytes of JSON that they may have in all.
        """
        self.acquire()
        try:
            kept = list(self._records)
        finally:
            self.release()
        records: list[dict[str, Any]] = []
        for record in reversed(kept[max(0, len(kept) - most) :]):
            size -= len(msgspec.json.encode(record)) + 1
            if size < 0:
                break
            records.insert(0, record)
        return records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(_readable(record))
        # Where nobody set logging up, Python shows warnings on standard error unless a handler is
        # there: this one is none of those that show.
        if logging.lastResort is not None and not self._is_heard(record.name):
            logging.lastResort.handle(record)

    def _is_heard(self, name: str) -> bool:
        """True if another handler hears a logger."""
        at: logging.Logger | None = logging.getLogger(name)
        while at is not None:
            if any(handler is not self for handler in at.handlers):
                return True
            at = at.parent if at.propagate else None
        return False


def _readable(record: logging.LogRecord) -> dict[str, Any]:
    raised = record.exc_info[0] if record.exc_info else None
    return {
        "time": round(record.created, 3),
        "level": record.levelname,
        "logger": record.name,
        "line": record.lineno,
        "text": redact_url(_text(record))[:MOST_TEXT],
        **({"raised": raised.__name__} if raised is not None else {}),
    }


def _text(record: logging.LogRecord) -> str:
    text, arguments = safe_text(record.msg), record.args
    try:
        if record.name.startswith(OWN_TEXTS):
            return record.getMessage()
        if isinstance(arguments, tuple) and arguments:
            return text % tuple(map(_shown, arguments))
    except Exception:  # noqa: BLE001 - what users' objects raise when they are shown
        pass  # it does not fit its arguments, which other handlers report
    return text


def _shown(argument: object) -> object:
    """The part of an argument that may leave the process."""
    if isinstance(argument, int | float):
        return argument
    if isinstance(argument, BaseException):
        return type(argument).__name__
    text = safe_text(argument)
    # Objects of dynbus say their names in angle brackets.
    if text.startswith("<") and type(argument).__module__.startswith(f"{ROOT}."):
        return text
    first, *rest = text.split(maxsplit=1) or [""]
    # A text in a language without spaces, JSON or a token is no name.
    if not _NAME.fullmatch(first):
        return f"({len(text)} characters)"
    return f"{first} ..." if rest else first


recent_log: Final = RecentLog()
"""The log of this process."""
