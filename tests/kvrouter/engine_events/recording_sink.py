"""A sink that remembers, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from dynbus.kvrouter.events import BlockStored, KvEvent
from dynbus.kvrouter.stream.awareness import CacheAwareness

from .frames import plain


class RecordingSink:
    """Everything that was published of each rank since its last reset."""

    def __init__(self) -> None:
        self.ranks: dict[int, list[KvEvent]] = {}
        self.resets: list[int] = []
        self.said: list[tuple[int, str]] = []

    def publish(self, events: Sequence[KvEvent], *, dp_rank: int) -> None:
        self.ranks.setdefault(dp_rank, []).extend(plain(events))

    def reset(self, dp_rank: int) -> None:
        self.resets.append(dp_rank)
        self.ranks.pop(dp_rank, None)

    def set_awareness(self, awareness: CacheAwareness, *, dp_rank: int) -> None:
        self.said.append((dp_rank, str(awareness)))

    def engine_hashes(self, dp_rank: int = 0) -> list[int]:
        """Of all blocks stored, in the order of their events."""
        return [
            engine_hash
            for event in self.ranks.get(dp_rank, ())
            if isinstance(event, BlockStored)
            for engine_hash in event.engine_hashes
        ]
