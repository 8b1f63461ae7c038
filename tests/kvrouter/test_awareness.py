"""What routing knows of the caches is said, with the reason when it is not everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynbus.kvrouter.awareness import MAX_BEHIND, Observation, cache_awareness
from dynbus.kvrouter.staleness import Staleness, StalenessWindow

GOOD = Observation(following=True, ranks=4)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "exact"),
        ({"behind": MAX_BEHIND}, "exact"),
        ({"behind": MAX_BEHIND + 1}, "degraded (257 messages behind)"),
        ({"connected": False}, "degraded (the server is out of reach)"),
        ({"caught_up": False}, "degraded (the stream is still being read)"),
        ({"unsettled": 1}, "degraded (1 of 4 ranks being resent)"),
        (
            {"unsettled": 2, "trouble": "a/0: gap"},
            "degraded (2 of 4 ranks being resent: a/0: gap)",
        ),
        ({"evicted": 9}, "degraded (9 blocks forgotten at max_blocks)"),
        ({"silent": 1}, "degraded (1 instances send no events)"),
        ({"silent": 1, "approximates": True}, "approximate (1 instances send no events)"),
        ({"silent": 3, "ranks": 0}, "off (3 instances send no events)"),
        (
            {"silent": 3, "ranks": 0, "approximates": True},
            "approximate (3 instances send no events)",
        ),
        ({"ranks": 0}, "exact"),
        ({"following": False}, "off (no events are followed)"),
        (
            {"connected": False, "silent": 1, "approximates": True},
            "degraded (the server is out of reach)",
        ),
    ],
)
def test_the_worst_that_is_true_is_said(change: dict[str, Any], expected: str) -> None:
    assert str(cache_awareness(replace(GOOD, **change))) == expected


def test_staleness_looks_back_at_the_last_messages() -> None:
    window = StalenessWindow(messages=100)
    for age in [*[9.0] * 50, *range(1, 101)]:
        window.add(float(age))

    assert window.summary() == Staleness(100, p50=50.0, p99=99.0, worst=100.0)
    assert StalenessWindow().summary() == Staleness(0, 0.0, 0.0, 0.0)
