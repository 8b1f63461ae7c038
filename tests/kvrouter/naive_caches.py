"""What caches hold, kept in the simplest way: each engine hash with the path of its block."""

from __future__ import annotations

import struct
from collections.abc import Sequence

Path = tuple[int, ...]


def packed(blocks: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(blocks)}Q", *blocks)


class NaiveCaches:
    """By name of the cache, the path to the block of each engine hash."""

    def __init__(self) -> None:
        self.paths: dict[object, dict[int, Path]] = {}

    def store(
        self, name: object, parent: int | None, engine: Sequence[int], blocks: Sequence[int]
    ) -> bool:
        """Store a chain; False when a parent is missing, from where on nothing is stored."""
        held = self.paths.setdefault(name, {})
        before = parent
        for engine_hash, block in zip(engine, blocks, strict=True):
            known = before is None or before in held
            path = (*(held[before] if before is not None and known else ()), block)
            if known and held.get(engine_hash) == path:
                before = engine_hash
                continue
            held.pop(engine_hash, None)
            if before is not None and before not in held:
                return False
            held[engine_hash] = (*(held[before] if before is not None else ()), block)
            before = engine_hash
        return True

    def remove(self, name: object, engine: Sequence[int]) -> None:
        for engine_hash in engine:
            self.paths.get(name, {}).pop(engine_hash, None)

    def find(self, blocks: Sequence[int]) -> dict[object, int]:
        """How many of these blocks each cache has from the first on."""
        found: dict[object, int] = {}
        for name, held in self.paths.items():
            paths = set(held.values())
            count = 0
            while count < len(blocks) and tuple(blocks[: count + 1]) in paths:
                count += 1
            if count:
                found[name] = count
        return found
