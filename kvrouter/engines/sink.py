"""Where the events of engines go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dynbus.kvrouter.events import KvEvent
from dynbus.kvrouter.stream.awareness import CacheAwareness


class KvSink(Protocol):
    """What takes the KV-cache events of one engine, rank by rank and in order.

    Its methods return at once: the bridge that calls them must never fall behind its engine.
    """

    def publish(self, events: Sequence[KvEvent], *, dp_rank: int) -> None:
        """Take the next events of a rank."""
        ...

    def reset(self, dp_rank: int) -> None:
        """Forget what was published of a rank: it is not known any longer what the rank holds."""
        ...

    def set_awareness(self, awareness: CacheAwareness, *, dp_rank: int) -> None:
        """Take how far the events of a rank can be relied on from now on."""
        ...
