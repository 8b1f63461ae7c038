"""Spans of time as options are seconds, or text with a unit."""

from __future__ import annotations

from typing import Any

import pytest

from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.seconds import seconds_of


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0.0),
        (1.5, 1.5),
        ("5ms", 0.005),
        ("0.5s", 0.5),
        ("2 m", 120.0),
        (" 1h ", 3600.0),
        ("7d", 604800.0),
    ],
)
def test_a_span_of_time_is_seconds(given: Any, seconds: float) -> None:
    assert seconds_of(given, "wait") == pytest.approx(seconds)


@pytest.mark.parametrize(
    "given", [-1, "5", "ms", "5 minutes", "-5ms", "1e3s", True, None, float("nan"), 1e10, "99999d"]
)
def test_what_is_none_is_refused_with_what_would_be(given: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        seconds_of(given, "Embedder.embed: batch_wait")

    assert f"Embedder.embed: batch_wait={given!r} must be 0 or more seconds" in str(raised.value)
    assert '"5ms"' in str(raised.value)
