"""The report of a run under faults, for people and for programs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from .checker import Checker, Spread, Stall, Violation, spread
from .nemesis import Done
from .servers import ServerHoldings


class Resources(msgspec.Struct, frozen=True):
    """The resources that the process of the callers holds.

    Attributes:
        memory: MiB that are resident; 0 where the system does not tell.
        descriptors: open ones; 0 where the system does not tell.
    """

    memory: float
    descriptors: int
    tasks: int

    @classmethod
    def now(cls) -> Resources:
        """Those of this process at this moment; to be called on its event loop."""
        tasks = len(asyncio.all_tasks())
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            descriptors = len(list(Path("/proc/self/fd").iterdir()))
        except OSError:
            return cls(0.0, 0, tasks)
        return cls(round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1), descriptors, tasks)


class Sample(msgspec.Struct, frozen=True):
    """The resources of the callers' process and of the servers at a moment.

    Attributes:
        at: seconds after the faults began.
        servers: None where they could not be asked at this moment.
    """

    at: float
    held: Resources
    servers: ServerHoldings | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of a trial and their effects.

    Attributes:
        held: whether every promise was kept.
        interrupted: whether the run was ended before its time.
        seconds: of faults.
        instances: by node, as they were started.
        load: what was called, in words.
        carried_out, skipped: how many faults, by kind.
        ends: of calls, by the code of their error.
        stalls: seconds from a fault to the next item of the streams that stood still, by its kind;
            those that compute their items again apart from the others.
        unexplained: seconds of stalls that no fault preceded.
        longest: the longest stalls; `at` is in seconds after the faults began.
        whole_after: seconds from the last fault until every instance was ready again.
        broken: how often each promise was not kept.
        violations: the first of those.
        before, after: what the callers' process and the servers held when the faults began and when
            all was over.
        samples: the same in between.
    """

    held: bool
    interrupted: bool
    seed: int
    seconds: float
    kinds: list[str]
    pauses: tuple[float, float]
    servers: int
    instances: dict[str, int]
    callers: int
    load: list[str]
    carried_out: dict[str, int]
    skipped: dict[str, int]
    calls: int
    items: int
    ends: dict[str, int]
    stalls: dict[str, Spread]
    unexplained: Spread | None
    longest: list[Stall]
    whole_after: float | None
    broken: dict[str, int]
    violations: list[Violation]
    before: Sample
    after: Sample
    samples: list[Sample]
    steps: list[Done]


def figures_of(checker: Checker) -> tuple[dict[str, Spread], Spread | None]:
    """The stalls by the kind of fault, and the unexplained ones."""
    by_kind = dict(sorted(checker.stalls.by_kind.items()))
    spreads = {kind: spread(durations) for kind, durations in by_kind.items()}
    known = {kind: durations for kind, durations in spreads.items() if durations is not None}
    return known, spread(checker.stalls.unexplained)


def longest_of(checker: Checker, began: float) -> list[Stall]:
    """The longest stalls, in seconds after `began`."""
    return [
        msgspec.structs.replace(each, seconds=round(each.seconds, 3), at=round(each.at - began, 3))
        for each in checker.stalls.longest
    ]
