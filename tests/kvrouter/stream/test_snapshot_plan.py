"""A snapshot is due often enough, and always before the limits reach the one before."""

from __future__ import annotations

from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.errors import ConfigError
from dynbus.bus.transport import StreamInfo, StreamLimits
from dynbus.kvrouter.stream.snapshot_writer import SnapshotPlan
from dynbus.kvrouter.stream.snapshots import Coverage, SnapshotInfo

PLAN = SnapshotPlan(messages=1000, size=1_000_000, seconds=60.0)
WIDE = StreamLimits(max_bytes=1 << 40, max_age=1e9)


def stream(last: int, *, first: int = 1, mean: int = 100) -> StreamInfo:
    messages = last - first + 1
    return StreamInfo(messages, messages * mean, first, last, created=1.0)


def covered(sequence: int, written: float) -> SnapshotInfo:
    return SnapshotInfo("Engine", Coverage(1.0, sequence), 0, written, 0, 0)


def reason(
    latest: SnapshotInfo | None,
    found: StreamInfo,
    limits: StreamLimits = WIDE,
    now: float = 10.0,
) -> str:
    due = PLAN.due(latest, found, limits, now)
    return "" if due is None else due.reason


def test_an_empty_stream_needs_none() -> None:
    assert reason(None, StreamInfo(0, 0, 0, 0, 1.0)) == ""


def test_the_first_one_is_due_at_once() -> None:
    assert reason(None, stream(1)) == "there is none"


def test_none_is_due_when_nothing_is_new_however_old_the_latest_is() -> None:
    assert reason(covered(500, 0.0), stream(500), now=1e9) == ""


@pytest.mark.parametrize(
    ("latest", "found", "now", "expected"),
    [
        (covered(500, 0.0), stream(1499), 10.0, ""),
        (covered(500, 0.0), stream(1500), 10.0, "1000 messages since the latest"),
        (covered(500, 0.0), stream(600, mean=10_000), 10.0, "about 1000000 bytes since the latest"),
        (covered(500, 0.0), stream(501), 60.0, "60 s since the latest"),
    ],
)
def test_it_is_due_after_so_many_messages_bytes_or_seconds(
    latest: SnapshotInfo, found: StreamInfo, now: float, expected: str
) -> None:
    assert reason(latest, found, now=now) == expected


@pytest.mark.parametrize(
    ("limits", "found", "now"),
    [
        (StreamLimits(max_bytes=20_000), stream(600), 10.0),
        (StreamLimits(max_messages=200), stream(600), 10.0),
        (StreamLimits(max_age=20.0), stream(501), 10.0),
        (WIDE, stream(600, first=401), 10.0),
        (WIDE, stream(600, first=550), 10.0),
    ],
)
def test_it_is_urgent_when_a_limit_comes_near_what_the_latest_needs(
    limits: StreamLimits, found: StreamInfo, now: float
) -> None:
    due = PLAN.due(covered(500, 0.0), found, limits, now)

    assert due is not None
    assert due.is_urgent


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=300),
    st.integers(20_000, 100_000),
)
def test_with_a_look_after_every_message_the_latest_is_always_connected(
    sizes: list[int], max_bytes: int
) -> None:
    limits = StreamLimits(max_bytes=max_bytes)
    first, latest = 1, covered(1, 0.0)
    for last in range(1, len(sizes) + 1):
        while sum(sizes[first - 1 : last]) > max_bytes:
            first += 1
        size = sum(sizes[first - 1 : last])
        found = StreamInfo(last - first + 1, size, first, last, 1.0)
        assert first <= latest.coverage.sequence + 1

        if PLAN.due(latest, found, limits, 1.0) is not None:
            latest = covered(last, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [{"messages": 0}, {"seconds": -1.0}, {"seconds": nan}, {"margin": 1.0}, {"margin": nan}],
)
def test_a_plan_that_cannot_be_kept_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="snapshot plan"):
        SnapshotPlan(**wrong)  # type: ignore[arg-type]
