"""Spans of time as options: seconds as a number, or text such as `"5ms"`."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from dynbus.bus.errors import ConfigError

from .endpoint import MAX_SECONDS

UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TEXT: Final = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})")


def seconds_of(value: Any, label: str) -> float:
    """Seconds, of a number or of text such as `"5ms"`, `"2s"`, `"10m"`, `"1h"`, `"7d"`.

    Args:
        label: how messages name the option.

    Raises:
        ConfigError: it is neither, or less than 0, or too long.
    """
    seconds = math.nan
    if isinstance(value, str):
        if match := _TEXT.fullmatch(value.strip()):
            seconds = float(match[1]) * UNITS[match[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    if not 0 <= seconds <= MAX_SECONDS:
        raise ConfigError(
            f'{label}={value!r} must be 0 or more seconds, or text with a unit, such as "5ms", '
            f'"2s", "10m", "1h" or "7d"; {MAX_SECONDS:g} seconds at most'
        )
    return seconds
