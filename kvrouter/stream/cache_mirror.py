"""What one rank's engine holds, as its events tell, so that it can be told again.

`CacheMirror` takes in the events in the very way in which `RadixIndex` does, so that an index
that follows the published events and one that follows `state()` hold the same.

Blocks are numbered slots, a child's number above its parent's. A block that was removed
before its children stays as their nameless link to the root, and goes with the last of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheDigest,
    Hashes,
    KvEvent,
    Tier,
)

from .digest import MASK, block_digest

STATE_BLOCKS: Final = 1024
"""Blocks of one event of `state()` at most."""

COMPACT_FROM: Final = 1024

_NO_PARENT: Final = -1


class CacheMirror:
    """The blocks that one rank holds, in all tiers. About 150 bytes for each.

    Attributes:
        unknown_parents: stored events that were left out for their parent.
    """

    def __init__(self) -> None:
        self._tiers: dict[Tier, _TierMirror] = {}
        self.unknown_parents = 0

    def __repr__(self) -> str:
        return f"<CacheMirror [{self.digest().blocks} blocks]>"

    def apply(self, events: Sequence[KvEvent]) -> list[KvEvent]:
        """Take in events; returns those that an index can follow, in their order.

        Left out are chains whose parent is not held or is the child itself, and events
        without blocks.
        """
        accepted: list[KvEvent] = []
        at = 0
        while at < len(events):
            event = events[at]
            if isinstance(event, AllBlocksCleared):
                self._tiers.clear()
                accepted.append(event)
                at += 1
                continue
            last = at + 1
            kind = type(event)
            while last < len(events) and type(following := events[last]) is kind:
                if isinstance(following, AllBlocksCleared) or following.tier != event.tier:
                    break
                last += 1
            accepted += self._apply_alike(events[at:last], event.tier)
            at = last
        return accepted

    def _apply_alike(self, events: Sequence[KvEvent], tier: Tier) -> list[KvEvent]:
        """Take in events of one kind and tier."""
        mirror = self._tiers.get(tier)
        if mirror is None:
            mirror = self._tiers[tier] = _TierMirror(tier)
        stored = [one for one in events if isinstance(one, BlockStored) and len(one.engine_hashes)]
        if stored:
            accepted = mirror.store(stored)
            self.unknown_parents += len(stored) - len(accepted)
            return [*accepted]
        removed: list[KvEvent] = []
        engine_hashes: list[int] = []
        for event in events:
            if isinstance(event, BlockRemoved) and len(event.engine_hashes):
                removed.append(event)
                engine_hashes += _numbers(event.engine_hashes)
        mirror.remove(engine_hashes)
        return removed

    def clear(self) -> None:
        """Forget everything."""
        self._tiers.clear()

    def digest(self) -> CacheDigest:
        """How many blocks are held, and which."""
        tiers = self._tiers.values()
        return CacheDigest(
            sum(len(tier.slots) for tier in tiers), sum(tier.digest for tier in tiers) & MASK
        )

    def state(self) -> Iterator[KvEvent]:
        """Events that bring an empty index to what is held at this moment.

        Parents come before their children. What is held is noted at once, in a tenth of a
        second for a million blocks; the events are made as they are asked for.
        """
        noted = [tier.note() for tier in self._tiers.values()]

        def tell() -> Iterator[KvEvent]:
            for tier in noted:
                yield from tier

        return tell()


class _TierMirror:
    """The blocks of one tier.

    Attributes:
        slots: by the engine's hash.
        digest: of these blocks, not cut to 64 bits.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.slots: dict[int, int] = {}
        self.digest = 0
        self._blocks = array("Q")
        self._parents = array("i")
        # What keeps a slot: its name and each child. A slot with 0 is free.
        self._keepers = array("I")
        self._live = 0

    def store(self, events: Sequence[BlockStored]) -> list[BlockStored]:
        """Store chains; returns those that could be."""
        engine_hashes: list[int] = []
        for event in events:
            engine_hashes += _numbers(event.engine_hashes)
        unique = len(set(engine_hashes)) == len(engine_hashes)
        if not unique or not self.slots.keys().isdisjoint(engine_hashes):
            return [event for event in events if self._store_singly(event)]
        if not self._store_new(events, engine_hashes):
            return [event for event in events if self._store_singly(event)]
        return list(events)

    def _store_new(self, events: Sequence[BlockStored], engine_hashes: list[int]) -> bool:
        """Store chains of blocks that are all new; False, and nothing done, if one lacks its
        parent."""
        slots = self.slots
        base = at = len(self._blocks)
        slots.update(zip(engine_hashes, range(base, base + len(engine_hashes)), strict=True))
        starts: list[tuple[int, int]] = []
        parents = array("i")
        for event in events:
            parent = event.parent_hash
            slot = _NO_PARENT if parent is None else slots.get(parent, at)
            if slot >= at:
                for engine_hash in engine_hashes:
                    del slots[engine_hash]
                return False
            starts.append((at, slot))
            end = at + len(event.engine_hashes)
            parents.append(slot)
            parents.extend(range(at, end - 1))
            at = end
        blocks = b"".join(_block_bytes(event.block_hashes) for event in events)
        self._parents += parents
        self._blocks.frombytes(blocks)
        keepers = self._keepers
        keepers.frombytes(np.full(at - base, 2, dtype=np.uint32).tobytes())
        # The last of each chain has no child, unless a later chain hangs there.
        for (start, slot), event in zip(starts, events, strict=True):
            keepers[start + len(event.engine_hashes) - 1] -= 1
            if slot != _NO_PARENT:
                keepers[slot] += 1
        self._live += at - base
        self._count(engine_hashes, np.frombuffer(blocks, dtype="<u8"), 1)
        return True

    def _store_singly(self, event: BlockStored) -> bool:
        """Store block by block: some of the hashes are held already, or come twice."""
        before = event.parent_hash
        engine_hashes = _numbers(event.engine_hashes)
        if before is not None and before not in self.slots:
            return False
        if any(one == other for one, other in pairwise((before, *engine_hashes))):
            return False
        blocks = array("Q", _block_bytes(event.block_hashes))
        for engine_hash, block in zip(engine_hashes, blocks, strict=True):
            if not self._holds_after(before, engine_hash, block):
                if engine_hash in self.slots:
                    self.remove([engine_hash])
                self._store_one(before, engine_hash, block)
            before = engine_hash
        return True

    def _holds_after(self, before: int | None, engine_hash: int, block: int) -> bool:
        slot = self.slots.get(engine_hash)
        parent = _NO_PARENT if before is None else self.slots.get(before)
        return slot is not None and self._parents[slot] == parent and self._blocks[slot] == block

    def _store_one(self, before: int | None, engine_hash: int, block: int) -> None:
        parent = _NO_PARENT if before is None else self.slots[before]
        if parent != _NO_PARENT:
            self._keepers[parent] += 1
        self.slots[engine_hash] = len(self._blocks)
        self._blocks.append(block)
        self._parents.append(parent)
        self._keepers.append(1)
        self._live += 1
        self._count([engine_hash], np.array([block], dtype=np.uint64), 1)

    def remove(self, engine_hashes: Sequence[int]) -> None:
        """Remove blocks in any order; those that are not held change nothing."""
        slots, parents, keepers = self.slots, self._parents, self._keepers
        names: list[int] = []
        blocks: list[int] = []
        for engine_hash in engine_hashes:
            slot = slots.pop(engine_hash, None)
            if slot is None:
                continue
            names.append(engine_hash)
            blocks.append(self._blocks[slot])
            while slot != _NO_PARENT:
                keepers[slot] -= 1
                if keepers[slot]:
                    break
                self._live -= 1
                slot = parents[slot]
        if names:
            self._count(names, np.array(blocks, dtype=np.uint64), -1)
            if len(keepers) > max(COMPACT_FROM, 2 * self._live):
                self._compact()

    def _count(self, names: list[int], blocks: NDArray[np.uint64], sign: int) -> None:
        self.digest += sign * block_digest(np.array(names, dtype=np.uint64), blocks, self.tier)

    def _compact(self) -> None:
        """Give up the free slots. The others keep their order."""
        keepers = np.array(self._keepers)
        kept = np.flatnonzero(keepers)
        places = np.full(len(keepers) + 1, _NO_PARENT, dtype=np.int32)
        places[kept] = np.arange(len(kept), dtype=np.int32)
        # A slot without a parent asks for the place at -1, which is the last and holds -1.
        self._parents = array("i", places[np.array(self._parents)[kept]].tobytes())
        self._blocks = array("Q", np.array(self._blocks)[kept].tobytes())
        self._keepers = array("I", keepers[kept].tobytes())
        at = places.tolist()
        self.slots = {engine_hash: at[slot] for engine_hash, slot in self.slots.items()}

    def note(self) -> Iterator[KvEvent]:
        """What is held at this moment, as events."""
        keepers = np.array(self._keepers)
        blocks, parents = np.array(self._blocks), np.array(self._parents)
        count = len(self.slots)
        names = np.zeros(len(keepers), dtype=np.uint64)
        named = np.fromiter(self.slots.values(), dtype=np.int64, count=count)
        names[named] = np.fromiter(self.slots, dtype=np.uint64, count=count)
        kept = np.flatnonzero(keepers)
        is_link = keepers > 0
        is_link[named] = False
        links = np.flatnonzero(is_link)
        names[links] = self._free_names(len(links))
        return _tell(self.tier, kept, names, blocks, parents, names[links])

    def _free_names(self, count: int) -> NDArray[np.uint64]:
        """Numbers that are no engine's hash of a held block."""
        found: list[int] = []
        candidate = 1
        while len(found) < count:
            if candidate not in self.slots:
                found.append(candidate)
            candidate += 1
        return np.array(found, dtype=np.uint64)


def _tell(
    tier: Tier,
    kept: NDArray[np.int64],
    names: NDArray[np.uint64],
    blocks: NDArray[np.uint64],
    parents: NDArray[np.int32],
    links: NDArray[np.uint64],
) -> Iterator[KvEvent]:
    """The slots `kept` as chains, then the removal of `links`, which are not held."""
    follows = np.flatnonzero(parents[kept][1:] != kept[:-1]) + 1
    bounds = [0, *follows.tolist(), len(kept)] if len(kept) else []
    for start, end in zip(bounds, bounds[1:], strict=False):
        for at in range(start, end, STATE_BLOCKS):
            chain = kept[at : min(at + STATE_BLOCKS, end)]
            parent = int(parents[chain[0]])
            before = None if parent == _NO_PARENT else int(names[parent])
            yield BlockStored(before, names[chain], blocks[chain], tier)
    for at in range(0, len(links), STATE_BLOCKS):
        yield BlockRemoved(links[at : at + STATE_BLOCKS], tier)


def _numbers(hashes: Hashes) -> Sequence[int]:
    if isinstance(hashes, np.ndarray):
        numbers: list[int] = hashes.tolist()
        return numbers
    return hashes


def _block_bytes(hashes: Hashes) -> bytes:
    if isinstance(hashes, np.ndarray):
        return hashes.astype("<u8", copy=False).tobytes()
    return (hashes if isinstance(hashes, array) else array("Q", hashes)).tobytes()
