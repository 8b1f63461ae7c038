"""The schedule of faults: a pure function of a seed, so that every run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError


class Kind(StrEnum):
    """A kind of fault."""

    KILL = "kill"
    """kill -9 of one instance's process."""
    KILL_THIRD = "kill-third"
    """kill -9 of a third of all instances at once."""
    FREEZE = "freeze"
    """SIGSTOP of one instance's process, and SIGCONT some seconds later."""
    JOIN = "join"
    """One more instance starts."""
    LEAVE = "leave"
    """One instance drains and ends."""
    RESTART = "restart"
    """A rolling restart of one node: each instance is replaced and drained."""
    SERVER = "server"
    """kill -9 of one nats-server, which starts again some moments later."""
    LEADER = "leader"
    """The same of the server that leads the records of instances, in a cluster."""
    FREEZE_SERVER = "freeze-server"
    """SIGSTOP of one nats-server: nobody is told; then SIGCONT, or kill -9 and another start."""
    DELAY = "delay"
    """Messages to and from one process are late."""
    CUT = "cut"
    """The connections of one process are reset."""
    HALF_OPEN = "half-open"
    """The connections of one process stay open and carry nothing, or one direction only."""
    SILENCE = "silence"
    """The link of one process is silent, new connections too; what it held arrives at last."""


SECONDS: Final[Mapping[Kind, tuple[float, float]]] = {
    Kind.FREEZE: (1.0, 5.0),
    Kind.SERVER: (0.1, 2.0),
    Kind.LEADER: (0.5, 3.0),
    Kind.FREEZE_SERVER: (1.0, 6.0),
    Kind.DELAY: (0.5, 4.0),
    Kind.HALF_OPEN: (0.5, 4.0),
    Kind.SILENCE: (1.0, 8.0),
}
"""The duration of each fault, from and to; the others are over at once."""

WEIGHTS: Final[Mapping[Kind, int]] = {
    Kind.KILL: 6,
    Kind.KILL_THIRD: 1,
    Kind.FREEZE: 4,
    Kind.JOIN: 2,
    Kind.LEAVE: 2,
    Kind.RESTART: 1,
    Kind.SERVER: 2,
    Kind.LEADER: 2,
    Kind.FREEZE_SERVER: 1,
    Kind.DELAY: 2,
    Kind.CUT: 3,
    Kind.HALF_OPEN: 2,
    Kind.SILENCE: 2,
}
"""The frequency of each kind beside the others."""


class Step(msgspec.Struct, frozen=True):
    """One fault.

    Attributes:
        at: seconds after the faults begin.
        kind: of `Kind`.
        pick: from 0 to 1, which of those that are there then it hits.
        lasts: seconds until it is healed.
        manner: from 0 to 1, how, where there are several ways.
    """

    at: float
    kind: Kind
    pick: float
    lasts: float = 0.0
    manner: float = 0.0

    def among(self, count: int) -> int:
        """The index of one of `count`, from 0."""
        return min(int(self.pick * count), count - 1)


def schedule(
    seed: int, kinds: Sequence[Kind], seconds: float, pauses: tuple[float, float]
) -> list[Step]:
    """The faults of a run, in the order of their beginnings; all are healed at its end.

    The same arguments give the same steps, with every version of Python.

    Args:
        seconds: of the whole run.
        pauses: seconds between the beginnings of two faults, the shortest and the longest.
    """
    return list(_steps(random.Random(seed), kinds, seconds, pauses)) if kinds else []


def _steps(
    chance: random.Random, kinds: Sequence[Kind], seconds: float, pauses: tuple[float, float]
) -> Iterator[Step]:
    # Only `random()` is the same in all versions.
    drawn = [kind for kind in Kind if kind in kinds for _ in range(WEIGHTS[kind])]
    at = 0.0
    while True:
        at += _between(pauses, chance.random())
        kind = drawn[min(int(chance.random() * len(drawn)), len(drawn) - 1)]
        pick, long, manner = chance.random(), chance.random(), chance.random()
        lasts = _between(SECONDS.get(kind, (0.0, 0.0)), long)
        if at >= seconds:
            return
        # One that would last beyond the end is healed with it.
        yield Step(
            round(at, 3), kind, round(pick, 6), round(min(lasts, seconds - at), 3), round(manner, 6)
        )


def _between(bounds: tuple[float, float], share: float) -> float:
    low, high = bounds
    return low + (high - low) * share


def parse_kinds(text: str) -> list[Kind]:
    """Kinds out of a list with commas.

    Raises:
        ConfigError: one of them does not exist, or there is none.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in list(Kind):
            raise ConfigError(
                f"there is no fault {word!r}{suggestion(word, list(Kind))}; there are "
                f"{', '.join(Kind)}"
            )
    if not words:
        raise ConfigError(f"{text!r} names no fault; there are {', '.join(Kind)}")
    return [Kind(word) for word in words]


def parse_pauses(text: str) -> tuple[float, float]:
    """`2` or `0.5-3`: seconds between two faults.

    Raises:
        ConfigError: it is neither.
    """
    low, dash, high = text.partition("-")
    try:
        pauses = (float(low), float(high if dash else low))
    except ValueError:
        pauses = (0.0, 0.0)
    if not 0.01 <= pauses[0] <= pauses[1] <= 3600.0:
        raise ConfigError(
            f"{text!r} is no pause between two faults: write seconds, for example 2 or 0.5-3, of "
            "0.01 to 3600"
        )
    return pauses
