"""The contents of one rank's cache, kept once: its later events are read by them, and it is told
again from them.

`CacheMirror` takes in the events in the very way in which `RadixIndex` does, so that an index
that follows the published events and one that follows `state()` hold the same.

Blocks that follow each other share a `Stretch`: what a block costs is its name, its hash, and its
entry in a dictionary. A stretch hangs from a place in another one, which was made before it. A
block that was removed before those below it stays there as their link to the root.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.events import (
    BlockRemoved,
    BlockStored,
    CacheDigest,
    Hashes,
    KvEvent,
    Tier,
)
from dynbus.kvrouter.hashing import hash_prefixes
from dynbus.kvrouter.radix.runs import MOST_NAMED, NAME_BYTES, find_name, pack_name

from .digest import MASK, block_digest

STATE_BLOCKS: Final = 1024
"""Blocks of one event of `state()` at most."""

FOLD_BYTES: Final = 1 << 16
"""Bytes of names that came or went, from which on the digest is brought up to date."""

_NO_PARENT: Final = -1
_unpack_name: Final = struct.Struct("=Q").unpack_from


class Stretch(msgspec.Struct, eq=False, gc=False):
    """Up to `MOST_NAMED` blocks that follow each other.

    Attributes:
        number: of a later one it is higher.
        above: the number of the one that it hangs from; 0 for none.
        above_at: the place there of the block before the first one here.
        names: the engine's hash of each block, 8 bytes in the machine's order.
        blocks: the block hash of each, 8 little-endian bytes.
        salt: of the sequence.
        generation: of the mirror when they came.
        held: how many of the blocks are held.
        gone: a bit for each place whose block is not held.
        below: how many stretches hang from it.
        pinned: behind the last place from which one of them hangs, or hung.
    """

    number: int
    above: int
    above_at: int
    names: bytearray
    blocks: bytearray
    salt: str | None
    generation: int
    held: int
    gone: int = 0
    below: int = 0
    pinned: int = 0

    def place_of(self, name: int) -> int:
        """The place of a held block."""
        names, packed = self.names, pack_name(name)
        if not self.gone and names.endswith(packed):
            # What comes next mostly follows the last one.
            return len(names) // NAME_BYTES - 1
        place = find_name(names, packed)
        while self.gone >> place & 1:
            # The same name was here before, at another place.
            place += 1
            place += find_name(names[place * NAME_BYTES :], packed)
        return place

    def name_at(self, place: int) -> int:
        """The engine's hash of a block, held or not."""
        name: int = _unpack_name(self.names, place * NAME_BYTES)[0]
        return name

    def block_at(self, place: int) -> bytearray:
        """The block hash at a place."""
        return self.blocks[place * NAME_BYTES : (place + 1) * NAME_BYTES]

    def drop(self, place: int) -> None:
        """A block is held no longer."""
        at = place * NAME_BYTES
        if place < self.pinned or at + NAME_BYTES < len(self.names):
            self.gone |= 1 << place
            return
        del self.names[at:]
        del self.blocks[at:]
        if self.gone:
            self.trim()

    def trim(self) -> None:
        """Give up the places at the end that nobody needs."""
        end = len(self.names) // NAME_BYTES
        while end > self.pinned and self.gone >> (end - 1) & 1:
            end -= 1
        self.gone &= (1 << end) - 1
        del self.names[end * NAME_BYTES :]
        del self.blocks[end * NAME_BYTES :]


class HeldBlock(NamedTuple):
    """The facts about a held block.

    Attributes:
        parent: the engine's hash of the block before it; None for the first of a sequence.
    """

    block_hash: int
    parent: int | None


class CacheMirror:
    """The blocks that one rank holds, in all tiers. About 110 bytes for each.

    Attributes:
        unknown_parents: stored events that were left out for their parent.
        generation: what is noted of the blocks that come from now on.
    """

    def __init__(self) -> None:
        self._tiers: dict[Tier, _TierMirror] = {}
        self.unknown_parents = 0
        self.generation = 0

    def __repr__(self) -> str:
        return f"<CacheMirror [{self.blocks} blocks]>"

    def apply(self, events: Sequence[KvEvent]) -> list[KvEvent]:
        """Take in events; returns those that an index can follow, in their order.

        Left out are chains whose parent is not held or is the child itself, and events
        without blocks.
        """
        return [event for event in events if self._apply(event)]

    def _apply(self, event: KvEvent) -> bool:
        if isinstance(event, BlockStored):
            return bool(len(event.engine_hashes)) and self.store(event) is not None
        if isinstance(event, BlockRemoved):
            self.remove(event)
            return bool(len(event.engine_hashes))
        self.clear()
        return True

    def store(self, event: BlockStored, *, salt: str | None = None) -> Sequence[int] | None:
        """Take in a chain of at least one block.

        Args:
            salt: what is noted of the blocks that are new.

        Returns:
            Those of its blocks that its tier had already, or that it names for the second time;
            None where it is left out, and counted.
        """
        again = self._tier(event.tier).store(event, salt, self.generation)
        self.unknown_parents += again is None
        return again

    def remove(self, event: BlockRemoved) -> None:
        """Take in a removal."""
        self._tier(event.tier).remove(_numbers(event.engine_hashes))

    def clear(self) -> None:
        """Forget everything."""
        self._tiers.clear()

    def _tier(self, tier: Tier) -> _TierMirror:
        mirror = self._tiers.get(tier)
        if mirror is None:
            mirror = self._tiers[tier] = _TierMirror(tier)
        return mirror

    # Questions ------------------------------------------------------------------------

    @property
    def blocks(self) -> int:
        """The number of blocks that are held, counted once for each tier."""
        return sum(len(tier.held) for tier in self._tiers.values())

    def held(self, tier: Tier) -> Mapping[int, Stretch]:
        """The blocks of a tier by the engine's hashes, each with those that it lies among."""
        return self._tier(tier).held

    def stretch_of(self, engine_hash: int) -> Stretch | None:
        """The same, whatever tier has the block; None where none has it."""
        for tier in self._tiers.values():
            stretch = tier.held.get(engine_hash)
            if stretch is not None:
                return stretch
        return None

    def find(self, engine_hash: int) -> HeldBlock | None:
        """The facts about a block, whatever tier holds it."""
        for tier in self._tiers.values():
            stretch = tier.held.get(engine_hash)
            if stretch is not None:
                place = stretch.place_of(engine_hash)
                block_hash = int.from_bytes(stretch.block_at(place), "little")
                return HeldBlock(block_hash, tier.parent_of(stretch, place))
        return None

    def digest(self) -> CacheDigest:
        """The number and the digest of the blocks that are held."""
        return CacheDigest(
            self.blocks, sum(tier.make_digest() for tier in self._tiers.values()) & MASK
        )

    def prefixes(self, most: int) -> list[int]:
        """The hash of each prefix that ends with a held block, of the latest blocks and those that
        lead to them; see `hash_prefixes`.

        Args:
            most: that are hashed of each tier, with blocks that are held no longer among them.
        """
        return [one for tier in self._tiers.values() for one in tier.prefixes(most)]

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
        held: by the engine's hash, the stretch that has the block.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.held: dict[int, Stretch] = {}
        # By their numbers, the lowest first.
        self._stretches: dict[int, Stretch] = {}
        self._last_number = 0
        self._digest = 0
        # Of blocks that are not in the digest yet, and of those that still are.
        self._new_names, self._new_blocks = bytearray(), bytearray()
        self._old_names, self._old_blocks = bytearray(), bytearray()

    # Storing and removing -------------------------------------------------------------

    def store(self, event: BlockStored, salt: str | None, generation: int) -> Sequence[int] | None:
        """Store a chain; returns those of its blocks that were here already.

        Nothing is done, and None returned, where its parent is not held or is its child.
        """
        held = self.held
        parent = event.parent_hash
        if parent is not None and parent not in held:
            return None
        names = _numbers(event.engine_hashes)
        blocks = _block_bytes(event.block_hashes)
        if held.keys().isdisjoint(names) and len(set(names)) == len(names):
            self._put(parent, names, blocks, salt, generation)
            return ()
        if any(one == other for one, other in pairwise((parent, *names))):
            return None
        again: list[int] = []
        before = parent
        for at, name in enumerate(names):
            block = blocks[at * NAME_BYTES : (at + 1) * NAME_BYTES]
            if name in held:
                again.append(name)
            if not self._holds_after(before, name, block):
                self.remove([name])
                self._put(before, [name], block, salt, generation)
            before = name
        return again

    def _holds_after(self, before: int | None, name: int, block: bytes) -> bool:
        """True if this name is held already as this very block after `before`."""
        stretch = self.held.get(name)
        if stretch is None:
            return False
        place = stretch.place_of(name)
        if not stretch.blocks.startswith(block, place * NAME_BYTES):
            return False
        if before is None:
            return not place and not stretch.above
        above = self.held.get(before)
        if above is None:
            return False
        if place:
            return above is stretch and above.place_of(before) == place - 1
        return above.number == stretch.above and above.place_of(before) == stretch.above_at

    def _put(
        self,
        parent: int | None,
        names: Sequence[int],
        blocks: bytes,
        salt: str | None,
        generation: int,
    ) -> None:
        """Store a chain of blocks that are all new."""
        packed = array("Q", names).tobytes()
        self._new_names += packed
        self._new_blocks += blocks
        if len(self._new_names) >= FOLD_BYTES:
            self.make_digest()
        held = self.held
        above: Stretch | None = None
        place = at = 0
        if parent is not None:
            above = held[parent]
            place = above.place_of(parent)
            length = len(above.names) // NAME_BYTES
            if place + 1 == length and above.generation == generation and above.salt == salt:
                at = min(len(names), MOST_NAMED - length)
                above.names += packed[: at * NAME_BYTES]
                above.blocks += blocks[: at * NAME_BYTES]
                above.held += at
                held.update(dict.fromkeys(names[:at], above))
                place += at
        while at < len(names):
            end = min(at + MOST_NAMED, len(names))
            self._last_number = number = self._last_number + 1
            stretch = self._stretches[number] = Stretch(
                number,
                0 if above is None else above.number,
                place,
                bytearray(packed[at * NAME_BYTES : end * NAME_BYTES]),
                bytearray(blocks[at * NAME_BYTES : end * NAME_BYTES]),
                salt,
                generation,
                end - at,
            )
            held.update(dict.fromkeys(names[at:end], stretch))
            if above is not None:
                above.below += 1
                above.pinned = max(above.pinned, place + 1)
            above, place, at = stretch, end - at - 1, end

    def remove(self, names: Sequence[int]) -> None:
        """Remove blocks in any order; those that are not held change nothing."""
        held = self.held
        for name in names:
            stretch = held.pop(name, None)
            if stretch is None:
                continue
            place = stretch.place_of(name)
            self._old_names += pack_name(name)
            self._old_blocks += stretch.block_at(place)
            stretch.held -= 1
            if stretch.held or stretch.below:
                stretch.drop(place)
            else:
                self._give_up(stretch)
        if len(self._old_names) >= FOLD_BYTES:
            self.make_digest()

    def _give_up(self, stretch: Stretch) -> None:
        """Forget a stretch of which nothing is held and from which nothing hangs, and so on up."""
        while not stretch.held and not stretch.below:
            del self._stretches[stretch.number]
            if not stretch.above:
                return
            stretch = self._stretches[stretch.above]
            stretch.below -= 1
        if not stretch.below:
            stretch.pinned = 0
            stretch.trim()

    # Questions ------------------------------------------------------------------------

    def parent_of(self, stretch: Stretch, place: int) -> int | None:
        """The engine's hash of the block before a place; None for none."""
        if place:
            return stretch.name_at(place - 1)
        return self._stretches[stretch.above].name_at(stretch.above_at) if stretch.above else None

    def prefixes(self, most: int) -> list[int]:
        """See `CacheMirror.prefixes`."""
        chosen: set[int] = set()
        room = most
        for number in reversed(self._stretches):
            path: list[Stretch] = []
            while number and number not in chosen:
                path.append(self._stretches[number])
                number = path[-1].above
            room -= sum(len(one.names) for one in path) // NAME_BYTES
            if room < 0:
                break
            chosen.update(one.number for one in path)
        hashes: dict[int, list[int]] = {}
        held: list[int] = []
        for number in sorted(chosen):
            one = self._stretches[number]
            after = hashes[one.above][one.above_at] if one.above else None
            hashes[number] = of_stretch = hash_prefixes(_blocks(one.blocks), after)
            held += [each for at, each in enumerate(of_stretch) if not one.gone >> at & 1]
        return held

    def make_digest(self) -> int:
        """The digest of these blocks, not cut to 64 bits."""
        if self._new_names:
            new = _names(self._new_names), _blocks(self._new_blocks)
            self._digest += block_digest(*new, self.tier)
            self._new_names, self._new_blocks = bytearray(), bytearray()
        if self._old_names:
            old = _names(self._old_names), _blocks(self._old_blocks)
            self._digest -= block_digest(*old, self.tier)
            self._old_names, self._old_blocks = bytearray(), bytearray()
        return self._digest

    def _trim(self) -> None:
        """Give up the places from which nothing hangs any longer, though something else does from
        the same stretch."""
        ends: dict[int, int] = {}
        for one in self._stretches.values():
            ends[one.above] = max(ends.get(one.above, 0), one.above_at + 1)
        for one in self._stretches.values():
            one.pinned = ends.get(one.number, 0)
            if one.gone:
                one.trim()

    def note(self) -> Iterator[KvEvent]:
        """The blocks that are held at this moment, as events."""
        self._trim()
        stretches = list(self._stretches.values())
        names = _names(b"".join([one.names for one in stretches])).copy()
        blocks = _blocks(b"".join([one.blocks for one in stretches]))
        firsts: dict[int, int] = {}
        links: list[int] = []
        chains: list[tuple[int, int]] = []
        at = 0
        for one in stretches:
            firsts[one.number] = at
            before = firsts[one.above] + one.above_at if one.above else _NO_PARENT
            if not chains or before == _NO_PARENT or before != at - 1:
                chains.append((at, before))
            links += [at + place for place in range(one.gone.bit_length()) if one.gone >> place & 1]
            at += len(one.names) // NAME_BYTES
        names[links] = self._free_names(len(links))
        return _tell(self.tier, chains, names, blocks, names[links])

    def _free_names(self, count: int) -> NDArray[np.uint64]:
        """Numbers that are no engine's hash of a held block."""
        free: list[int] = []
        candidate = 1
        while len(free) < count:
            if candidate not in self.held:
                free.append(candidate)
            candidate += 1
        return np.array(free, dtype=np.uint64)


def _tell(
    tier: Tier,
    chains: Sequence[tuple[int, int]],
    names: NDArray[np.uint64],
    blocks: NDArray[np.uint64],
    links: NDArray[np.uint64],
) -> Iterator[KvEvent]:
    """Chains of blocks, each with the place of its first one and of that one's parent, then the
    removal of `links`, which are not held."""
    bounds = [*(start for start, _ in chains), len(names)]
    for (start, before), end in zip(chains, bounds[1:], strict=True):
        for at in range(start, end, STATE_BLOCKS):
            parent = None if before == _NO_PARENT else int(names[before])
            before = min(at + STATE_BLOCKS, end) - 1
            yield BlockStored(parent, names[at : before + 1], blocks[at : before + 1], tier)
    for at in range(0, len(links), STATE_BLOCKS):
        yield BlockRemoved(links[at : at + STATE_BLOCKS], tier)


def _names(packed: bytes | bytearray) -> NDArray[np.uint64]:
    return np.frombuffer(packed, dtype=np.uint64)


def _blocks(packed: bytes | bytearray) -> NDArray[np.uint64]:
    return np.frombuffer(packed, dtype="<u8")


def _numbers(hashes: Hashes) -> Sequence[int]:
    if isinstance(hashes, np.ndarray):
        numbers: list[int] = hashes.tolist()
        return numbers
    return hashes


def _block_bytes(hashes: Hashes) -> bytes:
    if isinstance(hashes, np.ndarray):
        return hashes.astype("<u8", copy=False).tobytes()
    return (hashes if isinstance(hashes, array) else array("Q", hashes)).tobytes()
