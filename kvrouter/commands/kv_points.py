"""How a point of the stream is written on the command line."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final, NamedTuple

from dynbus.bus.clock import unix_time
from dynbus.kvrouter.stream.history import NOW, Point

_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class PointRequest(NamedTuple):
    """A point, and a later one to compare it with."""

    before: Point
    after: Point | None


def parse_points(time: str | None, sequence: int | None, to: str | None) -> PointRequest:
    """The points that `--time` or `--seq`, and `--to` name.

    Raises:
        ValueError: they name none, or in the wrong order; says what to write.
    """
    if (time is None) == (sequence is None):
        raise ValueError("give either --time or --seq")
    before = Point(sequence) if time is None else Point(time=parse_time(time))
    if to is None:
        return PointRequest(before, None)
    if to == "now":
        return PointRequest(before, NOW)
    if time is not None:
        after = Point(time=parse_time(to))
    elif to.isdecimal():
        after = Point(int(to))
    else:
        raise ValueError(f"--to {to!r}: with --seq it is a sequence, or now")
    if (before.sequence or 0, before.time or 0.0) > (after.sequence or 0, after.time or 0.0):
        raise ValueError("--to lies before the other point: exchange the two")
    return PointRequest(before, after)


def parse_time(text: str) -> float:
    """A time as Unix seconds: ISO 8601 (local time unless it names a zone), Unix seconds, or so
    long ago: 90s, 10m, 2h, 1d.

    Raises:
        ValueError: it is none of them.
    """
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return unix_time() - float(ago[1]) * _SECONDS[ago[2]]
    try:
        return float(text) if text.replace(".", "", 1).isdecimal() else _iso(text)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is no time: write 2026-01-31T12:00:00Z, Unix seconds, or 10m for ten "
            "minutes ago"
        ) from None


def _iso(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
