"""How far an index has followed its stream, and how that goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .awareness import CacheAwareness
from .staleness import Staleness


class Position(NamedTuple):
    """How far a stream was applied.

    Attributes:
        sequence: of the last message that was applied; 0 for none.
        created: when the stream was made of which that is; None before it was looked at.
    """

    sequence: int = 0
    created: float | None = None


@dataclass(frozen=True, slots=True)
class FollowerStatus:
    """How a follower fares.

    Attributes:
        behind: messages that the stream had for it beyond `position` when that one was sent.
        refused: messages that could not be used: of another rank than their subject names, of an
            epoch too far ahead, or not readable.
        mismatches: digests that differed from the index.
        comparisons: digests that were compared in full.
        requests: resyncs that were asked for.
        recreations: times at which the stream was another one than before.
        failures: of looks at the stream and the instances, and of messages that were held back.
    """

    position: Position
    behind: int
    staleness: Staleness
    awareness: CacheAwareness
    ranks: int
    refused: int
    mismatches: int
    comparisons: int
    requests: int
    recreations: int
    failures: int
