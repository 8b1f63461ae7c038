"""The awareness of routing: the degree to which its knowledge of the caches can be relied on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

MAX_BEHIND: Final = 256
"""Messages behind the stream's end up to which an index counts as current."""
MOST_NAMED: Final = 3
"""Instances that are named in a reason."""
MAX_REASON: Final = 200
"""Characters of a reason that a rank gives."""

_UNPRINTABLE: Final = re.compile(r"[^!-~]+")


class AwarenessLevel(StrEnum):
    """The quality of the knowledge of caches.

    Attributes:
        EXACT: what each instance says that it holds, but for messages under way.
        APPROXIMATE: only what the router's own decisions suggest, or what engines hold at most.
        DEGRADED: blocks are missing, or what is known is old; the reason says which.
        OFF: nothing is known.
    """

    EXACT = "exact"
    APPROXIMATE = "approximate"
    DEGRADED = "degraded"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class CacheAwareness:
    """The degree to which routing can rely on what it knows of the caches, and why not further.

    Attributes:
        reason: empty for `exact`.
    """

    level: AwarenessLevel
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.level.value} ({self.reason})" if self.reason else self.level.value


EXACT: Final = CacheAwareness(AwarenessLevel.EXACT)


def encode_awareness(awareness: CacheAwareness) -> str:
    """The header with what a rank says of its events; empty for `exact`."""
    if awareness.level is AwarenessLevel.EXACT:
        return ""
    return str(CacheAwareness(awareness.level, _printable(awareness.reason)))


def decode_awareness(text: str) -> CacheAwareness:
    """Read the header with what a rank has said of its events. A word that is not known is
    `degraded`."""
    if not text:
        return EXACT
    word, _, reason = text.partition(" (")
    is_known = word == AwarenessLevel.APPROXIMATE
    level = AwarenessLevel.APPROXIMATE if is_known else AwarenessLevel.DEGRADED
    return CacheAwareness(level, _printable(reason.removesuffix(")")))


def _printable(reason: str) -> str:
    return _UNPRINTABLE.sub(" ", reason)[:MAX_REASON].strip()


@dataclass(frozen=True, slots=True)
class Observation:
    """The facts that an index's follower sees of itself.

    Attributes:
        following: whether it reads the stream at all.
        connected: whether it reaches the server.
        caught_up: whether it has read what the stream held when it started.
        behind: messages that the stream has for it beyond what was applied.
        ranks: whose events it has.
        unsettled: ranks of these that miss blocks, or whose state is on its way.
        target: `namespace.component` of the instances.
        instances: how many are there; None when that is not known.
        silent: those of them whose events are not there, by id.
        evicted: blocks that were forgotten for the sake of the memory limit.
        trouble: of an unsettled rank, what is wrong with it.
        refusal: of a silent instance, why its events do not count; empty where none came.
        stated: of ranks that say of their own events that these are not exact, what they say.
    """

    following: bool
    connected: bool = True
    caught_up: bool = True
    behind: int = 0
    ranks: int = 0
    unsettled: int = 0
    target: str = ""
    instances: int | None = None
    silent: Sequence[str] = ()
    evicted: int = 0
    trouble: str = ""
    refusal: str = ""
    stated: Mapping[str, CacheAwareness] = field(default_factory=dict[str, CacheAwareness])


def doubted(awareness: CacheAwareness, doubts: Mapping[str, str]) -> CacheAwareness:
    """The awareness when some ranks are not to be believed.

    Args:
        doubts: why, by the name of the rank.
    """
    if not doubts or awareness.level is AwarenessLevel.OFF:
        return awareness
    reasons = [_first_of(doubts)]
    if awareness.reason:
        reasons.insert(0, awareness.reason)
    return CacheAwareness(AwarenessLevel.DEGRADED, ", ".join(reasons))


def _first_of(reasons: Mapping[str, str]) -> str:
    """The first of some ranks with its reason, and how many more there are."""
    name, why = next(iter(reasons.items()))
    others = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return f"{name}{others}: {why}" if why else f"{name}{others}"


def no_instances(target: str) -> CacheAwareness:
    """The awareness of a router that has nobody to route to."""
    return CacheAwareness(AwarenessLevel.OFF, f"no instances of {target}")


def named(instances: Sequence[str]) -> str:
    """The first of some ids, and how many more there are."""
    shown = ", ".join(sorted(instances)[:MOST_NAMED])
    more = len(instances) - MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def cache_awareness(seen: Observation) -> CacheAwareness:
    """The awareness that an observation amounts to: the worst that is true of it."""
    if not seen.following:
        return CacheAwareness(AwarenessLevel.OFF, "no events are followed")
    if seen.instances == 0:
        return no_instances(seen.target)
    reasons: list[str] = []
    if not seen.connected:
        reasons.append("the server is out of reach")
    elif not seen.caught_up:
        reasons.append("the stream is still being read")
    if seen.behind > MAX_BEHIND:
        reasons.append(f"{seen.behind} messages behind")
    if seen.unsettled:
        trouble = f": {seen.trouble}" if seen.trouble else ""
        reasons.append(f"{seen.unsettled} of {seen.ranks} ranks being resent{trouble}")
    if seen.evicted:
        reasons.append(f"{seen.evicted} blocks forgotten at max_blocks")
    if seen.silent:
        why = seen.refusal or "open a KvEventPublisher in each engine"
        reasons.append(f"no events from {named(seen.silent)}: {why}")
    said: dict[AwarenessLevel, dict[str, str]] = {}
    for name, awareness in sorted(seen.stated.items()):
        said.setdefault(awareness.level, {})[name] = awareness.reason
    if degraded := said.get(AwarenessLevel.DEGRADED):
        reasons.append(_first_of(degraded))
    if not seen.ranks and seen.silent:
        return CacheAwareness(AwarenessLevel.OFF, ", ".join(reasons))
    if reasons:
        return CacheAwareness(AwarenessLevel.DEGRADED, ", ".join(reasons))
    if approximate := said.get(AwarenessLevel.APPROXIMATE):
        return CacheAwareness(AwarenessLevel.APPROXIMATE, _first_of(approximate))
    return EXACT
