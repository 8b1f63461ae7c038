"""What a bridge tells of itself: its counters, and whether its events are exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dynbus.kvrouter.stream.awareness import AwarenessLevel

from .messages import QuarantineReason
from .translation import BlockSizeMismatch


@dataclass(frozen=True, slots=True)
class BridgeStatus:
    """The counters of a bridge since it was made, all ranks together.

    Attributes:
        level: of the rank that can be relied on the least.
        reason: why the published events are not what the engine holds, or not what it can reuse;
            None for `exact`.
        messages: taken, those from replays included.
        events: of the engine, by their kind: stored, removed, cleared.
        quarantined: events and messages that were not used, by the reason.
        filtered: events of KV-cache groups that tell nothing of a prefix, by their kind.
        gaps: times that messages were missing.
        replayed: messages that a replay brought.
        lost: messages that no replay brought.
        resets: times that what was known of a rank became void.
        unknown_parents: stored events whose parent had not been seen; not published.
        incomplete_blocks: not published.
        unknown_media: events with a medium that is not known; taken for the external tier.
        block_size_mismatch: of the first rank that has one; nothing of it is published.
        last_event_age: seconds since the last event; None before the first.
    """

    level: AwarenessLevel
    reason: str | None
    messages: int
    events: Mapping[str, int]
    quarantined: Mapping[QuarantineReason, int]
    filtered: Mapping[str, int]
    gaps: int
    replayed: int
    lost: int
    resets: int
    unknown_parents: int
    incomplete_blocks: int
    unknown_media: int
    block_size_mismatch: BlockSizeMismatch | None
    last_event_age: float | None

    @property
    def state(self) -> str:
        """The level as a word: `exact`, `approximate` or `degraded`."""
        return self.level.value


def worst_level(levels: Iterable[AwarenessLevel]) -> AwarenessLevel:
    """The one of some levels that can be relied on the least; `exact` of none."""
    order = list(AwarenessLevel)
    return max(levels, key=order.index, default=AwarenessLevel.EXACT)


@dataclass(slots=True)
class Counters:
    """What the ranks of a bridge count together."""

    messages: int = 0
    gaps: int = 0
    replayed: int = 0
    lost: int = 0
    resets: int = 0
    events: Counter[str] = field(default_factory=Counter[str])
    quarantined: Counter[QuarantineReason] = field(default_factory=Counter[QuarantineReason])
    last_event: float | None = None
