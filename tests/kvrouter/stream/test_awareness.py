"""What routing knows of the caches is said, with the reason when it is not everything."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dynbus.kvrouter.radix.index import RadixIndex
from dynbus.kvrouter.stream.awareness import (
    EXACT,
    MAX_BEHIND,
    MAX_REASON,
    AwarenessLevel,
    CacheAwareness,
    Observation,
    cache_awareness,
    decode_awareness,
    encode_awareness,
)
from dynbus.kvrouter.stream.follower import IndexFollower
from dynbus.kvrouter.stream.live_index import WINDOW, LiveIndex, Staleness
from dynbus.kvrouter.stream.resync import ResyncPlan
from dynbus.kvrouter.stream.snapshot_writer import SnapshotWriter
from dynbus.testing import TestKit, run

DEGRADED = CacheAwareness(AwarenessLevel.DEGRADED, "messages lost")
APPROXIMATE = CacheAwareness(AwarenessLevel.APPROXIMATE, "windows")

GOOD = Observation(following=True, ranks=4, target="llm.Engin")


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
        (
            {"silent": "ba"},
            "degraded (no events from a, b: open a KvEventPublisher in each engine)",
        ),
        (
            {"silent": "ba", "refusal": "those of a are refused, too new"},
            "degraded (no events from a, b: those of a are refused, too new)",
        ),
        (
            {"silent": "edcba", "ranks": 0},
            "off (no events from a, b, c and 2 more: open a KvEventPublisher in each engine)",
        ),
        ({"instances": 0, "ranks": 0}, "off (no instances of llm.Engin)"),
        ({"instances": 0}, "off (no instances of llm.Engin)"),
        ({"instances": 2}, "exact"),
        ({"ranks": 0}, "exact"),
        ({"following": False}, "off (no events are followed)"),
        ({"stated": {"a/0": DEGRADED}}, "degraded (a/0: messages lost)"),
        (
            {"stated": {"b/1": DEGRADED, "a/0": APPROXIMATE, "a/1": DEGRADED}, "unsettled": 1},
            "degraded (1 of 4 ranks being resent, a/1 and 1 more: messages lost)",
        ),
        ({"stated": {"a/0": APPROXIMATE}}, "approximate (a/0: windows)"),
    ],
)
def test_the_worst_that_is_true_is_said(change: dict[str, Any], expected: str) -> None:
    assert str(cache_awareness(replace(GOOD, **change))) == expected


def test_staleness_is_told_by_percentiles() -> None:
    ages = map(float, range(100, 0, -1))

    assert Staleness.of(ages) == Staleness(100, p50=50.0, p99=99.0, worst=100.0)
    assert Staleness.of([]) == Staleness(0, 0.0, 0.0, 0.0)


def test_staleness_looks_back_at_the_last_messages() -> None:
    live = LiveIndex("llm.Engin", RadixIndex(), ResyncPlan(), lambda: None)

    live.ages.extend([*[9.0] * 50, *[1.0] * WINDOW])

    assert Staleness.of(live.ages) == Staleness(WINDOW, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(("instances", "elected"), [(["a"], False), ([], False), (None, True)])
def test_nobody_takes_snapshots_of_what_nobody_publishes(
    instances: list[str] | None, elected: bool
) -> None:
    async def story() -> tuple[bool, int]:
        async with TestKit() as kit:
            connection = kit.caller.bus.data
            follower = IndexFollower(connection, "llm", "Engin", instances=lambda: instances)
            async with follower, SnapshotWriter(connection.jetstream, follower) as writer:
                await asyncio.sleep(20.0)
                return writer.status().is_elected, writer.status().written

    assert run(story()) == (elected, 0)


@pytest.mark.parametrize("awareness", [EXACT, DEGRADED, APPROXIMATE])
def test_what_a_rank_says_of_its_events_is_read_as_it_was_written(
    awareness: CacheAwareness,
) -> None:
    assert decode_awareness(encode_awareness(awareness)) == awareness


def test_exact_is_said_by_saying_nothing() -> None:
    assert encode_awareness(EXACT) == ""


def test_a_reason_with_any_characters_fits_a_header() -> None:
    hostile = CacheAwareness(AwarenessLevel.DEGRADED, "a\r\nEvil: 1\x00é" + "b" * 500)

    text = encode_awareness(hostile)

    assert text.isascii()
    assert text.isprintable()
    assert text.startswith("degraded (a Evil: 1 b")
    assert len(text) <= MAX_REASON + len("degraded ()")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("degraded", "degraded"),
        ("exact (no)", "degraded (no)"),
        ("off (no)", "degraded (no)"),
        ("\x1b[31mred (a\x1b[0m)", "degraded (a [0m)"),
        ("approximate (a (b))", "approximate (a (b))"),
    ],
)
def test_what_a_rank_says_in_words_that_are_not_known_is_degraded(text: str, expected: str) -> None:
    assert str(decode_awareness(text)) == expected
