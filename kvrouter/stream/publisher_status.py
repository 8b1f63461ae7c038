"""How a publisher and its ranks fare."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .awareness import CacheAwareness
from .event_log import EventLog, LogStatistics


@dataclass(frozen=True, slots=True)
class RankStatus:
    """How one rank's events fare.

    Attributes:
        blocks: held, counted once for each tier.
        waiting_bytes: of events that were not sent yet.
        in_flight: messages without an acknowledgement.
        unknown_parents: stored events that were left out, since their parent is not held.
        awareness: how far what the rank says can be relied on.
    """

    dp_rank: int
    event_epoch: int
    blocks: int
    waiting_bytes: int
    in_flight: int
    unknown_parents: int
    statistics: LogStatistics
    awareness: CacheAwareness


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """How a publisher fares.

    Attributes:
        failures: publishes that were not acknowledged, and steps that failed.
        malformed_requests: requests for a resync that cannot be read, or ask for no rank here.
        refused: calls with events that came after the publisher was closed.
        dropped: events that waited for a blocked event loop, when these were too many.
        last_failure: its text; empty when a publish was acknowledged since.
    """

    ranks: tuple[RankStatus, ...]
    failures: int
    malformed_requests: int
    refused: int
    dropped: int
    last_failure: str


def rank_status(log: EventLog) -> RankStatus:
    """How a log's rank fares at this moment."""
    return RankStatus(
        log.dp_rank,
        log.event_epoch,
        log.mirror.digest().blocks,
        log.waiting_bytes,
        log.in_flight,
        log.mirror.unknown_parents,
        replace(log.statistics),
        log.awareness,
    )
