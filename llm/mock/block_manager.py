"""The blocks of an engine's cache: who uses them, what is cached, what is evicted.

A block is unused, private to a request, or cached under its sequence hash. A cached block that
no request uses is idle: it can be found as part of a prefix, and it is evicted when room is
needed, the least recently used first. A request that computes a block which another has cached
meanwhile keeps its own copy private until it ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from dynbus.kvrouter.events import BlockRemoved, BlockStored, KvEvent


@dataclass(slots=True)
class Allocation:
    """The blocks of one request.

    Attributes:
        cached: sequence hashes of the cached blocks that it uses, in their order.
        private: how many other blocks it has.
    """

    cached: list[int] = field(default_factory=list[int])
    private: int = 0

    @property
    def blocks(self) -> int:
        return len(self.cached) + self.private


class BlockManager:
    """Which blocks of the cache are in use, and which prefixes it can serve.

    Args:
        blocks: how many blocks there are.
        headroom: how many of them admission leaves free for requests that run.
        prefix_caching: whether blocks are found again; without it there are no events.
    """

    def __init__(self, blocks: int, *, headroom: int = 0, prefix_caching: bool = True) -> None:
        self.blocks = blocks
        self.headroom = headroom
        self._prefix_caching = prefix_caching
        self._unused = blocks
        # By sequence hash, how many requests use a cached block; and those that none uses.
        self._uses: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._events: list[KvEvent] = []
        self._evicted: list[int] = []

    def __repr__(self) -> str:
        return f"<BlockManager [{self.active}/{self.blocks} active, {len(self._idle)} idle]>"

    @property
    def free(self) -> int:
        """Blocks that a request can have, those included that must be evicted for it."""
        return self._unused + len(self._idle)

    @property
    def active(self) -> int:
        """Blocks that requests use."""
        return self.blocks - self.free

    @property
    def cached(self) -> int:
        """Blocks that can be found as part of a prefix."""
        return len(self._uses) + len(self._idle)

    def prefix(self, sequence_hashes: Sequence[int], limit: int) -> tuple[int, int]:
        """How many of the first `limit` blocks are cached, from the first on, and in use."""
        if not self._prefix_caching:
            return 0, 0
        uses, idle = self._uses, self._idle
        found = used = 0
        for block in islice(sequence_hashes, limit):
            if block in uses:
                used += 1
            elif block not in idle:
                break
            found += 1
        return found, used

    def admits(self, blocks: int, used: int) -> bool:
        """Whether a request of `blocks` blocks has room, `used` of them being in use by others."""
        return blocks - used <= self.free - self.headroom

    def claim(self, allocation: Allocation, sequence_hashes: Sequence[int], count: int) -> None:
        """Give a request the first `count` blocks of a prefix that is cached."""
        uses, idle = self._uses, self._idle
        for block in islice(sequence_hashes, count):
            if block in uses:
                uses[block] += 1
            else:
                del idle[block]
                uses[block] = 1
            allocation.cached.append(block)

    def grow(self, allocation: Allocation, blocks: int) -> bool:
        """Let a request have `blocks` blocks in all; False, and nothing done, without room."""
        wanted = blocks - len(allocation.cached) - allocation.private
        if wanted <= 0:
            return True
        evictions = wanted - self._unused
        if evictions > len(self._idle):
            return False
        if evictions > 0:
            pop = self._idle.popitem
            self._evicted += [pop(last=False)[0] for _ in range(evictions)]
            self._unused = 0
        else:
            self._unused -= wanted
        allocation.private += wanted
        return True

    def store(
        self,
        allocation: Allocation,
        sequence_hashes: Sequence[int],
        block_hashes: Sequence[int],
        parent: int | None,
    ) -> None:
        """Cache blocks that a request has computed, and that follow each other.

        Args:
            sequence_hashes, block_hashes: of these blocks.
            parent: the sequence hash of the block before the first.
        """
        if not self._prefix_caching:
            return
        uses, idle = self._uses, self._idle
        first = 0
        for at, block in enumerate(sequence_hashes):
            if block in uses or block in idle:
                self._stored(allocation, sequence_hashes, block_hashes, first, at, parent)
                first = at + 1
        self._stored(allocation, sequence_hashes, block_hashes, first, len(sequence_hashes), parent)

    def _stored(
        self,
        allocation: Allocation,
        sequence_hashes: Sequence[int],
        block_hashes: Sequence[int],
        first: int,
        last: int,
        parent: int | None,
    ) -> None:
        if first == last:
            return
        new = sequence_hashes[first:last]
        self._uses.update(dict.fromkeys(new, 1))
        allocation.cached += new
        allocation.private -= len(new)
        self._note_evictions()
        before = sequence_hashes[first - 1] if first else parent
        self._events.append(BlockStored(before, new, block_hashes[first:last]))

    def release(self, allocation: Allocation) -> None:
        """Take back all blocks of a request; the last ones are evicted first."""
        uses, idle = self._uses, self._idle
        for block in reversed(allocation.cached):
            left = uses[block] - 1
            if left:
                uses[block] = left
            else:
                del uses[block]
                idle[block] = None
        self._unused += allocation.private
        allocation.cached.clear()
        allocation.private = 0

    def take_events(self) -> list[KvEvent]:
        """What was stored and removed since the last call, in its order."""
        self._note_evictions()
        events, self._events = self._events, []
        return events

    def _note_evictions(self) -> None:
        if self._evicted:
            self._events.append(BlockRemoved(self._evicted))
            self._evicted = []
