"""The status of a bridge: its counters, and the exactness of its events, with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from dynbus.kvrouter.stream.awareness import EXACT, AwarenessLevel, CacheAwareness

from .messages import QuarantineReason
from .translation import BlockSizeMismatch, Translation


@dataclass(slots=True)
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

    level: AwarenessLevel = AwarenessLevel.DEGRADED
    reason: str | None = None
    messages: int = 0
    events: Counter[str] = field(default_factory=Counter[str])
    quarantined: Counter[QuarantineReason] = field(default_factory=Counter[QuarantineReason])
    filtered: Counter[str] = field(default_factory=Counter[str])
    gaps: int = 0
    replayed: int = 0
    lost: int = 0
    resets: int = 0
    unknown_parents: int = 0
    incomplete_blocks: int = 0
    unknown_media: int = 0
    block_size_mismatch: BlockSizeMismatch | None = None
    last_event_age: float | None = None

    @property
    def state(self) -> str:
        """The level as a word: `exact`, `approximate` or `degraded`."""
        return self.level.value


def worst_level(levels: Iterable[AwarenessLevel]) -> AwarenessLevel:
    """The one of some levels that can be relied on the least; `exact` of none."""
    order = list(AwarenessLevel)
    return max(levels, key=order.index, default=AwarenessLevel.EXACT)


@dataclass(slots=True)
class RankKnowledge:
    """The knowledge of a rank's cache, and why it is not complete.

    Attributes:
        connection: why the engine cannot be heard; None while it can.
        behind: why there may be messages that were not read; None when there are none.
        history: why the engine may hold blocks of which it told before; None when it holds none.
        unread: events since then that could not be used.
        orphans: stored events since then that go on prefixes that are not known.
        asks_reports: whether the engine is to report what it reuses, which makes up for that.
    """

    connection: str | None = "not connected to the engine yet"
    behind: str | None = None
    history: str | None = "it is not known yet what the engine holds"
    unread: int = 0
    orphans: int = 0
    asks_reports: bool = False

    def begin_anew(self, history: str | None) -> None:
        """Void what was known; see `history`."""
        self.history = history
        self.unread = self.orphans = 0
        self.asks_reports = False

    def turned_over(self) -> None:
        """Note that what was not known is known by its use since, or was evicted."""
        self.history = None
        self.orphans = 0
        self.asks_reports = False

    @property
    def lacks_blocks(self) -> bool:
        """True if an engine that is heard holds blocks that are not known here."""
        return self.connection is None and (self.history is not None or self.orphans > 0)

    def awareness(self, translation: Translation) -> CacheAwareness:
        """The degree to which the rank's events can be relied on, and why not further."""
        reason = self._why_degraded(translation)
        if reason is not None:
            return CacheAwareness(AwarenessLevel.DEGRADED, reason)
        if groups := translation.unmodelled:
            # A window's or a state's blocks are not looked at: all that is known is a bound.
            return CacheAwareness(
                AwarenessLevel.APPROXIMATE,
                f"the engine reuses at most what is told: groups that are not modelled ({groups})",
            )
        return EXACT

    def _why_degraded(self, translation: Translation) -> str | None:
        if translation.mismatch is not None:
            return str(translation.mismatch)
        if known := self.connection or self.behind or self.history:
            return known
        if translation.without_prefix_group:
            kinds = ", ".join(sorted(translation.filtered))
            return f"the engine tells only of KV-cache groups that hold no whole prefix ({kinds})"
        if self.unread:
            return f"{self.unread} of its events could not be used"
        if self.orphans:
            return f"{self.orphans} stored events continue unknown prefixes"
        return None
