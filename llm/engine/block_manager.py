"""The blocks of an engine's cache: their users, cached prefixes, eviction.

A block is unused, private to a request, or cached under its sequence hash. A cached block that
no request uses is idle: it can be found as part of a prefix, and it is evicted when room is
needed, the least recently used first. A request that computes a block which another has cached
meanwhile keeps its own copy private until it ends: events tell of one of them.

A block is known by its id, from 0 on. It keeps it as long as it is cached or used, so an engine
may keep the block's keys and values at a place of this number. A request's block table is the list
of its blocks' ids, in the order of its tokens.

Blocks may be held beside: a reader or writer from elsewhere is one more user,
until the hold ends, whatever becomes of the request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container, Sequence
from itertools import islice

from dynbus.kvrouter import BlockRemoved, BlockStored, KvEvent

from .interface import BlockTier, CachedBlock


class BlockManager:
    """The blocks of the cache that are in use, and the prefixes that it can serve.

    Args:
        blocks: how many blocks there are.
        headroom: how many of them admission leaves free for requests that run.
        prefix_caching: whether blocks are found again; without it there are no events.

    Attributes:
        tier: where the contents of evicted blocks go; None for nowhere. Set before blocks are
            stored.
        is_traced: whether it is known of each cached block which one it follows, also without a
            tier. Set before blocks are stored.
        pins: the blocks of all holds, each counted as often as it is held.
    """

    def __init__(self, blocks: int, *, headroom: int = 0, prefix_caching: bool = True) -> None:
        self.blocks = blocks
        self.headroom = headroom
        self.tier: BlockTier | None = None
        self.is_traced = False
        self.pins = 0
        self._prefix_caching = prefix_caching
        # Those that were in use and are not; from `_touched` on none ever was.
        self._unused: list[int] = []
        self._touched = 0
        # Cached blocks by sequence hash; by id the hash, and how many requests and holds use it.
        self._cached: dict[int, int] = {}
        self._hashes: list[int | None] = []
        self._uses: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._events: list[KvEvent] = []
        self._evicted: list[int] = []
        self._holds: dict[str, list[int]] = {}
        # Of cached blocks, by their id, where they are traced: the parent's hash and the block's.
        self._origins: dict[int, tuple[int | None, int]] = {}

    def __repr__(self) -> str:
        return f"<BlockManager [{self.active}/{self.blocks} active, {len(self._idle)} idle]>"

    @property
    def free(self) -> int:
        """Blocks that a request can have, those included that must be evicted for it."""
        return self.blocks - self._touched + len(self._unused) + len(self._idle)

    @property
    def active(self) -> int:
        """Blocks that requests use, or that are held."""
        return self.blocks - self.free

    @property
    def cached(self) -> int:
        """Blocks that can be found as part of a prefix."""
        return len(self._cached)

    def prefix(self, sequence_hashes: Sequence[int], limit: int) -> tuple[int, int]:
        """The number of the first `limit` blocks that are cached, from the first on, and the number
        in use."""
        if not self._prefix_caching:
            return 0, 0
        cached, uses = self._cached, self._uses
        held = used = 0
        for sequence_hash in islice(sequence_hashes, limit):
            block = cached.get(sequence_hash)
            if block is None:
                break
            held += 1
            if uses[block]:
                used += 1
        return held, used

    def admits(self, blocks: int, used: int) -> bool:
        """True if a request of `blocks` blocks has room, `used` of them being in use by others."""
        return blocks - used <= self.free - self.headroom

    def claim(self, table: list[int], sequence_hashes: Sequence[int], count: int) -> None:
        """Give a request the first `count` blocks of a prefix that is cached.

        Args:
            table: its block table, which they are appended to.
        """
        cached, uses, idle = self._cached, self._uses, self._idle
        for sequence_hash in islice(sequence_hashes, count):
            block = cached[sequence_hash]
            if not uses[block]:
                del idle[block]
            uses[block] += 1
            table.append(block)

    def grow(self, table: list[int], blocks: int) -> bool:
        """Let a request have `blocks` blocks in all; False, and nothing done, without room."""
        wanted = blocks - len(table)
        if wanted <= 0:
            return True
        unused = self._unused
        evictions = wanted - len(unused) - (self.blocks - self._touched)
        if evictions > len(self._idle):
            return False
        if wanted > len(unused) and self._touched < self.blocks:
            self._touch(wanted - len(unused))
        if evictions > 0:
            self._evict(evictions)
        # The block that was used last is the likeliest to be in the processor's cache.
        taken = unused[: -wanted - 1 : -1]
        del unused[-wanted:]
        table += taken
        uses = self._uses
        for block in taken:
            uses[block] = 1
        return True

    def _touch(self, count: int) -> None:
        """Have so many blocks that were never in use for the last ones of `_unused`, or all."""
        begin, end = self._touched, min(self.blocks, self._touched + count)
        self._unused[:0] = range(end - 1, begin - 1, -1)
        self._hashes += [None] * (end - begin)
        self._uses += [0] * (end - begin)
        self._touched = end

    def _evict(self, count: int) -> None:
        pop, hashes, cached = self._idle.popitem, self._hashes, self._cached
        first = len(self._unused)
        for _ in range(count):
            block, _ = pop(last=False)
            sequence_hash = hashes[block]
            assert sequence_hash is not None, "an idle block is cached"
            hashes[block] = None
            del cached[sequence_hash]
            self._evicted.append(sequence_hash)
            self._unused.append(block)
        if self.tier is None:
            if self.is_traced:
                for block in self._unused[first:]:
                    del self._origins[block]
        else:
            gone = zip(self._unused[first:], self._evicted[-count:], strict=True)
            self.tier.evicted(
                [
                    CachedBlock(block, sequence_hash, *self._origins.pop(block))
                    for block, sequence_hash in gone
                ],
                self.find_cached,
            )

    def find_cached(self, sequence_hash: int) -> CachedBlock | None:
        """The block of a hash, where blocks are traced."""
        block = self._cached.get(sequence_hash)
        return None if block is None else CachedBlock(block, sequence_hash, *self._origins[block])

    def block_of(self, sequence_hash: int) -> int | None:
        """The block that is cached under a hash; None for none."""
        return self._cached.get(sequence_hash)

    def drop(self, sequence_hashes: Collection[int], below: Container[int] = ()) -> list[int]:
        """Forget blocks whose contents are wrong, and those that cannot be relied on without them:
        all that follow them, and all whose beginning is neither here nor below.

        Who uses one keeps it until it is released.

        Args:
            below: the hashes of the tier below, which has forgotten its own of them.

        Returns:
            The hashes of all that are forgotten.
        """
        assert self._traces, "it is not known what follows which block"
        cached = self._cached
        sound: dict[int, bool] = {}
        for sequence_hash in cached:
            chain: list[int] = []
            at: int | None = sequence_hash
            is_sound = True
            while at is not None:
                if at in sound:
                    is_sound = sound[at]
                    break
                chain.append(at)
                block = cached.get(at)
                if at in sequence_hashes or block is None:
                    is_sound = at not in sequence_hashes and at in below
                    break
                at, _ = self._origins[block]
            sound.update(dict.fromkeys(chain, is_sound))
        gone = [each for each in cached if not sound[each]]
        for sequence_hash in gone:
            block = cached.pop(sequence_hash)
            self._hashes[block] = None
            del self._origins[block]
            if not self._uses[block]:
                del self._idle[block]
                self._unused.append(block)
        self._evicted += gone
        return gone

    @property
    def _traces(self) -> bool:
        return self.is_traced or self.tier is not None

    def store(
        self,
        table: Sequence[int],
        first: int,
        sequence_hashes: Sequence[int],
        block_hashes: Sequence[int],
        parent: int | None,
    ) -> list[CachedBlock]:
        """Cache blocks of a request whose contents are there, and that follow each other.

        Args:
            table: the request's block table.
            first: where in it the first of these blocks is.
            sequence_hashes, block_hashes: of these blocks.
            parent: the sequence hash of the block before the first.

        Returns:
            Those that were not cached before, where blocks are traced.
        """
        stored: list[CachedBlock] = []
        if not self._prefix_caching:
            return stored
        cached, hashes = self._cached, self._hashes
        traces = self._traces
        new = 0
        for at, sequence_hash in enumerate(sequence_hashes):
            if sequence_hash in cached:
                self._tell_stored(sequence_hashes, block_hashes, new, at, parent)
                new = at + 1
            else:
                block = table[first + at]
                cached[sequence_hash] = block
                hashes[block] = sequence_hash
                if traces:
                    before = sequence_hashes[at - 1] if at else parent
                    self._origins[block] = before, block_hashes[at]
                    stored.append(CachedBlock(block, sequence_hash, before, block_hashes[at]))
        self._tell_stored(sequence_hashes, block_hashes, new, len(sequence_hashes), parent)
        return stored

    def _tell_stored(
        self,
        sequence_hashes: Sequence[int],
        block_hashes: Sequence[int],
        first: int,
        last: int,
        parent: int | None,
    ) -> None:
        if first == last:
            return
        self._note_evictions()
        before = sequence_hashes[first - 1] if first else parent
        self._events.append(
            BlockStored(before, sequence_hashes[first:last], block_hashes[first:last])
        )

    def release(self, table: list[int]) -> None:
        """Take back all blocks of a request; the last ones are evicted first."""
        hashes, uses, idle, unused = self._hashes, self._uses, self._idle, self._unused
        for block in reversed(table):
            uses[block] -= 1
            if uses[block]:
                continue
            if hashes[block] is None:
                unused.append(block)
            else:
                idle[block] = None
        table.clear()

    # Holds ----------------------------------------------------------------------------

    def hold(self, hold_id: str, blocks: Sequence[int]) -> None:
        """Keep blocks that a request uses, after that too, until `end_hold`.

        Args:
            hold_id: of no other hold.
        """
        assert hold_id not in self._holds, f"{hold_id} holds blocks already"
        held = self._holds[hold_id] = list(blocks)
        for block in held:
            self._uses[block] += 1
        self.pins += len(held)

    def end_hold(self, hold_id: str) -> None:
        """Take back the blocks of a hold; nothing for an unknown one."""
        held = self._holds.pop(hold_id, None)
        if held is not None:
            self.pins -= len(held)
            self.release(held)

    def holds(self, hold_id: str) -> bool:
        """True if there is a hold of this id."""
        return hold_id in self._holds

    # Events ---------------------------------------------------------------------------

    def take_events(self) -> list[KvEvent]:
        """The events of what was stored and removed since the last call, in its order."""
        self._note_evictions()
        if self.tier is not None:
            self._events += self.tier.take_events()
        events, self._events = self._events, []
        return events

    def _note_evictions(self) -> None:
        if self._evicted:
            if self.tier is not None:
                # First it is in the tier, then gone from here: at no time it is nowhere.
                self._events += self.tier.take_events()
            self._events.append(BlockRemoved(self._evicted))
            self._evicted = []
