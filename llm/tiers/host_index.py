"""The index of a host store: its blocks, their places, and the order in which they go.

A block is of no use without those before it. So the store is closed under prefixes: each block
that it keeps follows one that it keeps, too, or begins a prompt. A block goes only when nothing in
the store follows it: of these the one that was used the longest ago.

A place is a number from 0 on. A reader of a block from outside pins its place, and as long as it
is pinned the block stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Final

from dynbus.kvrouter import BlockRemoved, BlockStored, KvEvent, Tier
from dynbus.llm.engine.interface import CachedBlock, KeptBlocks

from .lasting import LastingBlock
from .sessions import KEPT_SHARE, KeptSessions, SessionKey

_STALE: Final = 64
"""Entries of the order of use that may be outdated, beside as many as there are blocks."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A block of the store.

    Attributes:
        parent: the sequence hash of the block before it; None at the beginning of a prompt.
        block_hash: by which routers know its tokens.
        followers: how many blocks of the store follow it.
        used: when it was used; a later use has a higher number.
        pins: how many hold it where it is.
    """

    place: int
    parent: int | None
    block_hash: int
    used: int
    followers: int = 0
    pins: int = 0


class HostIndex:
    """The blocks of a host store by their sequence hashes.

    Args:
        places: how many blocks there is room for.
        sessions: the conversations whose blocks do not go; none so far, and with their share of the
            places, unless given.

    Attributes:
        sessions: to be looked at.

    Raises:
        ValueError: there is room for none.
    """

    def __init__(self, places: int, sessions: KeptSessions | None = None) -> None:
        if places < 1:
            raise ValueError(f"places = {places}: a host store has room for 1 block at least")
        self.places = places
        self.sessions = KeptSessions(int(places * KEPT_SHARE)) if sessions is None else sessions
        self._entries: dict[int, _Entry] = {}
        self._at: list[int | None] = [None] * places
        self._unused = list(range(places - 1, -1, -1))
        self._clock = count(1)
        # Blocks that nothing follows and nobody pins, by their use; outdated ones are passed by.
        self._order: list[tuple[int, int]] = []
        # Blocks that were not taken in for want of room, as long as none can have come.
        self._refused: set[int] = set()
        self._events: list[KvEvent] = []
        self._removed: list[int] = []

    def __repr__(self) -> str:
        return f"<HostIndex [{len(self._entries)} of {self.places} blocks]>"

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence_hash: object) -> bool:
        return sequence_hash in self._entries

    @property
    def pinned(self) -> int:
        """Blocks that somebody holds where they are."""
        return sum(entry.pins > 0 for entry in self._entries.values())

    def find(self, sequence_hashes: Sequence[int], first: int, limit: int) -> list[int]:
        """The places of the blocks `[first, limit)` of a prompt, up to the first that is lacking.

        They count as used, and so do those before them.
        """
        entries = self._entries
        places: list[int] = []
        for sequence_hash in islice(sequence_hashes, first, limit):
            entry = entries.get(sequence_hash)
            if entry is None:
                break
            places.append(entry.place)
        if places:
            now = next(self._clock)
            for sequence_hash in islice(sequence_hashes, first + len(places)):
                self._use(sequence_hash, now)
        return places

    def _use(self, sequence_hash: int, now: int) -> None:
        entry = self._entries.get(sequence_hash)
        if entry is not None:
            entry.used = now
            self._line_up(sequence_hash, entry)

    def _line_up(self, sequence_hash: int, entry: _Entry) -> None:
        """Have a block go in its turn, if it may go."""
        if entry.followers or entry.pins or sequence_hash in self.sessions:
            return
        self._refused.clear()
        heappush(self._order, (entry.used, sequence_hash))
        if len(self._order) > 2 * len(self._entries) + _STALE:
            self._order = [
                (one.used, name)
                for name, one in self._entries.items()
                if not (one.followers or one.pins or name in self.sessions)
            ]
            heapify(self._order)

    def take_in(
        self, blocks: Sequence[CachedBlock], cached: Callable[[int], CachedBlock | None]
    ) -> dict[int, CachedBlock]:
        """Take in what a cache gives up, and what of its prefixes is not here yet; by their places.

        A block without those before it would be of no use when they are given up later and there
        is no room, and routers know no such blocks.

        Args:
            cached: the block of a sequence hash that the cache goes on to have, if it does.
        """
        taken: dict[int, CachedBlock] = {}
        gone = {block.sequence_hash: block for block in blocks}
        for block in blocks:
            chain = self._lacking(block, gone, cached)
            if not chain:
                continue
            places = self.add(
                chain[0].parent_hash,
                [each.sequence_hash for each in chain],
                [each.block_hash for each in chain],
            )
            if len(places) < len(chain):
                self._refused = {each.sequence_hash for each in chain[len(places) :]}
            # A place may be given to another block before anything was copied there.
            taken.update(zip(places, chain, strict=False))
        return taken

    def _lacking(
        self,
        block: CachedBlock,
        gone: dict[int, CachedBlock],
        cached: Callable[[int], CachedBlock | None],
    ) -> list[CachedBlock]:
        """The blocks of the prefix that ends with a block that are to be taken in, in their
        order.
        """
        chain: list[CachedBlock] = []
        at: CachedBlock | None = block
        while at is not None and at.sequence_hash not in self._entries:
            if at.sequence_hash in self._refused:
                # To walk to the beginning for each block of a long prompt takes seconds.
                return []
            chain.append(at)
            before = at.parent_hash
            if before is None or before in self._entries:
                chain.reverse()
                return chain
            at = gone.get(before) or cached(before)
        # It is here already, or a block before it is nowhere.
        return []

    def add(
        self, parent: int | None, sequence_hashes: Sequence[int], block_hashes: Sequence[int]
    ) -> list[int]:
        """Take in blocks that follow each other and are not here; others may go for them.

        Args:
            parent: the sequence hash of the block before the first, which is here; None where they
                begin a prompt.
            block_hashes: of the same blocks, for routers.

        Returns:
            The places of the first ones of them: of all for which there is room.
        """
        entries = self._entries
        if parent is not None and parent not in entries:
            return []
        now = next(self._clock)
        before = parent
        if before is not None:
            self._use(before, now)
        places: list[int] = []
        for sequence_hash, block_hash in zip(sequence_hashes, block_hashes, strict=True):
            # What the next one follows must not go for it.
            last = entries[before] if before is not None else None
            if last is not None:
                last.pins += 1
            place = self._unused.pop() if self._unused else self._remove_oldest()
            if last is not None:
                last.pins -= 1
            if place is None:
                break
            if last is not None:
                last.followers += 1
            entries[sequence_hash] = _Entry(place, before, block_hash, now)
            self._at[place] = sequence_hash
            places.append(place)
            before = sequence_hash
        if before is not None:
            self._line_up(before, entries[before])
        if places:
            self._note_removals()
            added = len(places)
            self._events.append(
                BlockStored(
                    parent, list(sequence_hashes[:added]), list(block_hashes[:added]), Tier.HOST
                )
            )
        return places

    def _remove_oldest(self) -> int | None:
        """The place of the block that goes; None where all are needed."""
        entries, order = self._entries, self._order
        while order:
            used, sequence_hash = heappop(order)
            entry = entries.get(sequence_hash)
            if entry is None or entry.used != used or entry.followers or entry.pins:
                continue
            if sequence_hash in self.sessions:
                continue
            del entries[sequence_hash]
            self._at[entry.place] = None
            self._removed.append(sequence_hash)
            if entry.parent is not None:
                parent = entries[entry.parent]
                parent.followers -= 1
                parent.used = max(parent.used, entry.used)
                self._line_up(entry.parent, parent)
            return entry.place
        return None

    @property
    def hashes(self) -> list[int]:
        """The sequence hashes of all blocks."""
        return list(self._entries)

    def remove(self, sequence_hashes: Iterable[int]) -> list[int]:
        """Let blocks go, and all that follow them; nothing for those that are not here.

        Nobody may have pinned any of them.

        Returns:
            The sequence hashes of all that have gone.
        """
        entries = self._entries
        left = [name for name in sequence_hashes if name in entries]
        if not left:
            return []
        followers: dict[int, list[int]] = {}
        for name, entry in entries.items():
            if entry.parent is not None:
                followers.setdefault(entry.parent, []).append(name)
        gone: list[int] = []
        while left:
            name = left.pop()
            removed = entries.pop(name, None)
            if removed is None:
                continue
            assert not removed.pins, "a block is removed that somebody reads"
            self._at[removed.place] = None
            self._unused.append(removed.place)
            self._refused.clear()
            gone.append(name)
            left += followers.get(name, ())
            parent = None if removed.parent is None else entries.get(removed.parent)
            if parent is not None and removed.parent is not None:
                parent.followers -= 1
                self._line_up(removed.parent, parent)
        self._removed += gone
        return gone

    def restore(self, blocks: Sequence[LastingBlock]) -> list[LastingBlock]:
        """Have blocks that lie at their places already, before any other.

        Returns:
            Those that are here now: without those whose beginning is lacking.
        """
        following: dict[int | None, list[LastingBlock]] = {}
        for block in blocks:
            following.setdefault(block.parent_hash, []).append(block)
        now = next(self._clock)
        here: list[LastingBlock] = []
        # Runs of blocks that follow each other, each with what it follows.
        left = following.pop(None, [])
        while left:
            block = left.pop()
            run: list[LastingBlock] = []
            while block.sequence_hash not in self._entries:
                self._entries[block.sequence_hash] = _Entry(
                    block.place, block.parent_hash, block.block_hash, now
                )
                self._at[block.place] = block.sequence_hash
                if block.parent_hash is not None:
                    self._entries[block.parent_hash].followers += 1
                run.append(block)
                *others, last = following.pop(block.sequence_hash, None) or [block]
                left += others
                block = last
            if run:
                here += run
                hashes = [one.sequence_hash for one in run]
                of_tokens = [one.block_hash for one in run]
                event = BlockStored(run[0].parent_hash, hashes, of_tokens, Tier.HOST)
                self._events.append(event)
        taken = {block.place for block in here}
        self._unused = [place for place in self._unused if place not in taken]
        for block in here:
            self._line_up(block.sequence_hash, self._entries[block.sequence_hash])
        return here

    def keep_for(
        self,
        key: SessionKey,
        sequence_hashes: Sequence[int],
        now: float,
        seconds: float,
        replaced: str = "",
    ) -> None:
        """Keep blocks of a conversation for so long, in place of those that it had.

        Args:
            now: on any clock, always the same one.
            replaced: the branch that it goes on from, which is kept no longer; empty for none.
        """
        gone = SessionKey(key.owner, replaced) if replaced else None
        freed = self.sessions.end_those_over(now)
        freed += self.sessions.keep(key, sequence_hashes, now + seconds, gone)
        self._free(freed)

    def blocks_of(self, key: SessionKey, now: float) -> KeptBlocks:
        """The blocks of a conversation that is not over, also those that are not here yet.

        Args:
            now: on the clock of `keep_for`.
        """
        self.end_those_over(now)
        hashes = [*self.sessions.blocks_of(key)]
        entries = (self._entries.get(one) for one in hashes)
        return KeptBlocks(hashes, [0 if one is None else one.block_hash for one in entries])

    def lacking(
        self, sequence_hashes: Iterable[int], cached: Callable[[int], CachedBlock | None]
    ) -> list[CachedBlock]:
        """Those of these blocks that a conversation has, and that are in the cache alone."""
        kept = (one for one in sequence_hashes if one in self.sessions)
        blocks = (cached(one) for one in kept if one not in self._entries)
        return [block for block in blocks if block is not None]

    def end_those_over(self, now: float) -> None:
        """Let the blocks of conversations go in their turn whose time is over."""
        self._free(self.sessions.end_those_over(now))

    def _free(self, sequence_hashes: Iterable[int]) -> None:
        for sequence_hash in sequence_hashes:
            entry = self._entries.get(sequence_hash)
            if entry is not None:
                self._line_up(sequence_hash, entry)

    def pin(self, places: Iterable[int]) -> None:
        """Hold the blocks at these places where they are; as often as it is asked for."""
        for place in places:
            sequence_hash = self._at[place]
            assert sequence_hash is not None, "a place that is pinned has a block"
            self._entries[sequence_hash].pins += 1

    def unpin(self, places: Iterable[int]) -> None:
        """Undo one `pin`."""
        for place in places:
            sequence_hash = self._at[place]
            assert sequence_hash is not None, "a block stays as long as it is pinned"
            entry = self._entries[sequence_hash]
            entry.pins -= 1
            self._line_up(sequence_hash, entry)

    def take_events(self) -> list[KvEvent]:
        """The events of stored and removed blocks since the last call, in their order."""
        self._note_removals()
        events, self._events = self._events, []
        return events

    def _note_removals(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(self._removed, Tier.HOST))
            self._removed = []
