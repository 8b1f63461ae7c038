"""The plan of the faults of one simulation, as data: drawn from a seed, printed, read, shortened.

Nothing here has a clock or I/O.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from dynbus.bus.errors import ConfigError


class Kind(StrEnum):
    """A kind of fault."""

    KILL = "kill"
    """kill -9 of one instance's process; another is started in its place when the fault ends."""
    FREEZE = "freeze"
    """A process stands still: none of its tasks and timers runs."""
    LEAVE = "leave"
    """An instance drains and ends; another is started in its place when the fault ends."""
    CUT = "cut"
    """A connection of a process breaks, or both do, and it is back when the fault ends."""
    CUT_SOME = "cut-some"
    """Both connections of several processes break at once."""
    SLOW = "slow"
    """Messages of one connection, or of both of a process, are late by up to 2 s."""
    LOSS = "loss"
    """Messages are lost, one in two to one in fifty."""
    SILENCE = "silence"
    """A link carries nothing, and what it holds arrives at last, or is lost once it is left."""
    LATE = "late"
    """A silent link is left for another, and what it held arrives when the fault ends."""
    SPLIT = "split"
    """The server of one process, which is not that of the others, loses them."""
    SERVER = "server"
    """The server dies, and is started again when the fault ends."""
    DISK = "disk"
    """The server dies, and is started again without what it had stored."""


SECONDS: Final[Mapping[Kind, tuple[float, float]]] = {
    Kind.KILL: (0.1, 3.0),
    Kind.FREEZE: (0.5, 5.0),
    Kind.LEAVE: (0.1, 1.0),
    Kind.CUT: (0.0, 3.0),
    Kind.CUT_SOME: (0.0, 3.0),
    Kind.SLOW: (0.5, 4.0),
    Kind.LOSS: (0.5, 4.0),
    Kind.SILENCE: (0.2, 8.0),
    Kind.LATE: (3.0, 8.0),
    Kind.SPLIT: (0.5, 15.0),
    Kind.SERVER: (0.1, 3.0),
    Kind.DISK: (0.1, 3.0),
}
"""The duration of each fault, from and to."""

STORED: Final = frozenset({Kind.DISK})
"""Those that lose what was confirmed: only for stories whose promises do not outlive a disk."""

LEAST_SECONDS: Final = 0.01
"""Below which a shortened plan makes no duration and no time shorter."""


class Fault(msgspec.Struct, frozen=True):
    """One fault.

    Attributes:
        at: seconds after the story begins.
        kind: of `Kind`.
        pick: from 0 to 1, which of those that are there then it hits.
        lasts: seconds until it is healed.
        manner: from 0 to 1, how, where there are several ways.
    """

    at: float
    kind: Kind
    pick: float = 0.0
    lasts: float = 0.0
    manner: float = 0.0

    def among(self, count: int) -> int:
        """The index of one of `count`, from 0."""
        return min(int(self.pick * count), count - 1)


Plan = tuple[Fault, ...]


def draw_plan(
    chance: random.Random,
    kinds: Mapping[Kind, float],
    *,
    seconds: float,
    most: int,
) -> Plan:
    """A plan of up to `most` faults, in the order of their beginnings.

    Args:
        kinds: the weight of each kind beside the others.
        seconds: after the beginning of the story, in which faults begin.
    """
    if not kinds or most < 1:
        return ()
    # Only `random()` is the same in all versions of Python.
    total = sum(kinds.values())
    faults: list[Fault] = []
    for _ in range(int(chance.random() * (most + 1))):
        at, left = round(chance.random() * seconds, 3), chance.random() * total
        kind = next(iter(kinds))
        for each, weight in kinds.items():
            kind, left = each, left - weight
            if left < 0:
                break
        low, high = SECONDS[kind]
        lasts = round(low + (high - low) * chance.random(), 3)
        pick, manner = round(chance.random(), 4), round(chance.random(), 4)
        faults.append(Fault(at, kind, pick, lasts, manner))
    return tuple(sorted(faults, key=lambda fault: fault.at))


def write_plan(plan: Plan) -> str:
    """A plan as text that `read_plan` reads."""
    return msgspec.json.encode(plan).decode()


def read_plan(text: str) -> Plan:
    """A plan of what `write_plan` wrote.

    Raises:
        ConfigError: it is no such text.
    """
    try:
        return msgspec.json.decode(text, type=Plan)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{text[:80]!r} is no plan: {error}; give the one that a failure shows"
        ) from None


def shorten(plan: Plan, fails: Callable[[Plan], bool], *, tries: int) -> tuple[Plan, int]:
    """The shortest plan with which `fails` is still true, as far as so many tries find it, and the
    tries that it took.

    Faults are left out, many at a time and then one by one; then what is left is made shorter and
    sooner. Delta debugging, as in Zeller and Hildebrandt, "Simplifying and isolating
    failure-inducing input", 2002.
    """
    used = 0
    is_shorter = True
    while is_shorter:
        is_shorter = False
        for candidate in _shorter(plan):
            if used == tries:
                return plan, used
            used += 1
            if fails(candidate):
                plan, is_shorter = candidate, True
                break
    return plan, used


def _shorter(plan: Plan) -> Iterator[Plan]:
    """The plans that are a step shorter, the greatest steps first."""
    size = len(plan)
    while size:
        for begin in range(0, len(plan), size):
            yield (*plan[:begin], *plan[begin + size :])
        size //= 2
    for index, fault in enumerate(plan):
        for simpler in _simpler(fault):
            yield _in_order([*plan[:index], simpler, *plan[index + 1 :]])


def _simpler(fault: Fault) -> Iterator[Fault]:
    for field in ("lasts", "at"):
        seconds: float = getattr(fault, field)
        shorter = round(seconds / 2, 3)
        if shorter >= LEAST_SECONDS:
            yield msgspec.structs.replace(fault, **{field: shorter})


def _in_order(faults: Sequence[Fault]) -> Plan:
    return tuple(sorted(faults, key=lambda fault: fault.at))
