"""The library under every fault that a simulation has: some seeds of each story at every push, and
minutes or hours of them with `-m simulation`.

`SIMULATION_SEEDS` is how many seeds a story has with the mark, `SIMULATION_SEED` the first.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple

import pytest

from dynbus.testing import Kind, Simulation, simulate

from .batches import batches
from .broken_links import STREAM_WINDOW, broken_links
from .caches import caches, elections
from .drains import drains
from .durable import events, jobs, letters, schedules, turns, waits
from .left_calls import broadcasts, left_calls
from .lost_words import late_requests, lost_words
from .moves import moves, stalled_streams
from .objects import objects
from .queues import queues
from .slow_readers import SETTINGS, slow_readers
from .stories import (
    avoided,
    calls,
    discovery,
    hiccups,
    interrupted_calls,
    interrupted_streams,
    levels,
    light_load,
    long_calls,
    many_calls,
    returns,
    split_streams,
    streams,
)

Story = Callable[[Simulation], Awaitable[object]]

SEEDS: Final = int(os.environ.get("SIMULATION_SEEDS", "200"))
FIRST: Final = int(os.environ.get("SIMULATION_SEED", "0"))
AT_A_PUSH: Final = 10
NARROW: Final = 16
"""Bytes that a stream may be ahead of its reader: ten items or so."""


class Telling(NamedTuple):
    """A story, and how it is told.

    Attributes:
        faults: their weights; None for all that lose nothing that is stored.
        settings: of the bus.
        most_faults: of one seed.
        paths: counts that have to be above 0 when it was told often enough: the ways of the library
            that the faults are to reach.
    """

    story: Story
    faults: Mapping[Kind, float] | None = None
    most_faults: int = 6
    paths: Sequence[str] = ()
    settings: Mapping[str, int] = {}


GONE: Final = "log: %s is gone; calls that were open at it: %d"
NOT_RENEWED: Final = "log: %r was not renewed: %s"
TAKEN_FOR_DEAD: Final = "log: %r was taken for dead: others may have its jobs"

LOST: Final = {Kind.KILL: 2.0, Kind.FREEZE: 1.0, Kind.CUT: 1.0}
"""What processes alone meet, and more of it: for promises about two that do the same."""

AWAY: Final = {Kind.FREEZE: 2.0, Kind.CUT: 1.0, Kind.CUT_SOME: 1.0, Kind.SILENCE: 1.0}
"""What keeps processes away for a while, and ends none."""

NO_INSTANCES: Final[Mapping[Kind, float]] = {
    kind: 1.0 for kind in Kind if kind not in (Kind.KILL, Kind.FREEZE, Kind.LEAVE, Kind.DISK)
}
"""For stories without instances, which the other faults hit."""

STORIES: Final = {
    "calls": Telling(
        calls,
        paths=(
            GONE,
            NOT_RENEWED,
            "buy: UnknownOutcome",
            "dropped: disconnected",
            "dropped: refused",
            "failed: UnknownOutcome",
            "repeated request",
            "resume",
            "unknown",
        ),
    ),
    "broadcasts": Telling(broadcasts, paths=("cancel", "failed: UnknownOutcome")),
    "late requests": Telling(
        late_requests, {}, paths=("dropped: refused", "repeated request", "unknown")
    ),
    "streams": Telling(
        streams,
        paths=(
            GONE,
            "cancel",
            "failed: Draining",
            "failed: StreamLost",
            "listed: StreamLost",
            "moved stream",
            "resume",
            "unknown",
        ),
    ),
    "narrow streams": Telling(streams, paths=("moved stream",), settings={"stream_window": NARROW}),
    "streams of split servers": Telling(
        split_streams, {Kind.SPLIT: 1.0}, paths=("moved stream", "listed: StreamLost")
    ),
    "interrupted streams": Telling(interrupted_streams, {Kind.SERVER: 1.0}, paths=("resume",)),
    "broken links": Telling(
        broken_links, {}, paths=("resume",), settings={"stream_window": STREAM_WINDOW}
    ),
    "slow readers": Telling(slow_readers, {}, paths=("failed: ReaderStalled",), settings=SETTINGS),
    "jobs": Telling(
        jobs,
        paths=(TAKEN_FOR_DEAD, "repeated", "tries beyond the first", "steps begun again"),
    ),
    "jobs whose takers are lost": Telling(jobs, LOST, 12, paths=("tries beyond the first",)),
    "waits": Telling(waits, paths=("repeated", "tries beyond the first")),
    "waits whose takers are lost": Telling(waits, LOST, 7),
    "turns": Telling(turns, paths=("tries beyond the first",)),
    "letters": Telling(letters, paths=("repeated", "tries beyond the first")),
    "letters of takers that are lost": Telling(letters, LOST, 12),
    "schedules": Telling(schedules, paths=("tries beyond the first",)),
    "left calls": Telling(left_calls, paths=("left", "cancel")),
    "batches": Telling(batches, {}),
    "lost words": Telling(lost_words, {}, paths=("dropped: refused",)),
    "moves": Telling(moves, {Kind.KILL: 1.0}, 12, paths=("lies: ResumeMismatch", "lost")),
    "stalled streams": Telling(stalled_streams, {}, paths=("moved stream",)),
    "queues": Telling(queues, {}, paths=("failed: Overloaded",)),
    "drains": Telling(drains, {Kind.LEAVE: 1.0}, 8, paths=("moved stream", "failed: Draining")),
    "objects": Telling(objects, NO_INSTANCES, paths=("put cancelled",)),
    "caches": Telling(caches),
    "elections": Telling(elections, {**LOST, Kind.KILL: 3.0, Kind.LEAVE: 3.0, Kind.SLOW: 1.0}, 12),
    "events": Telling(events, paths=("repeated", "events heard again")),
    "discovery": Telling(discovery, paths=(NOT_RENEWED,)),
    "discovery without the disk": Telling(
        discovery, {Kind.DISK: 1.0, Kind.KILL: 1.0}, paths=("fault: disk",)
    ),
    "light load": Telling(light_load, {}),
    "many calls": Telling(many_calls, {}),
    "interrupted calls": Telling(interrupted_calls, {Kind.SERVER: 1.0}),
    "hiccups": Telling(hiccups, {}, paths=("resume",)),
    "avoided": Telling(avoided, {}, paths=(GONE,)),
    "returns": Telling(returns, AWAY, 8, paths=(GONE,)),
    "levels": Telling(levels, {Kind.KILL: 1.0}, 12, paths=("moved stream",)),
    "long calls": Telling(long_calls, {Kind.LATE: 1.0}, paths=("dropped: stale",)),
}


def tell(name: str, seeds: range) -> Counter[str]:
    """Tell a story; what was counted."""
    one = STORIES[name]
    report = simulate(
        one.story,
        seeds=seeds,
        faults=one.faults,
        most_faults=one.most_faults,
        **one.settings,  # type: ignore[arg-type]
    )
    return report.counts


@pytest.mark.parametrize("name", STORIES)
def test_a_story_holds_with_some_seeds(name: str) -> None:
    tell(name, range(AT_A_PUSH))


@pytest.mark.simulation
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", STORIES)
def test_a_story_holds_and_reaches_all_that_it_is_to_reach(name: str) -> None:
    counts = tell(name, range(FIRST, FIRST + SEEDS))

    one = STORIES[name]
    kinds = [kind for kind in Kind if kind is not Kind.DISK]
    faults = kinds if one.faults is None else list(one.faults)
    expected = [*(f"fault: {kind}" for kind in faults), *one.paths]
    print(f"{name}: {SEEDS} seeds from {FIRST}")
    for key, number in sorted(counts.items()):
        print(f"  {number:7} {key}")
    assert [key for key in expected if not counts[key]] == []
