"""A compressed radix tree of blocks, and which cache holds which prefix of it.

A `Run` is a stretch of blocks without a branch: its block hashes lie side by side as bytes,
so that a prefix is found with a few comparisons of memory, whatever its length. What a
holder has of a run is one number, the end of what it holds without a gap from the root on:

    root ── run [0, 4) ──┬── run [4, 9)     ends = {a: 9, b: 7}
            ends = {a: 4,│
                    b: 4}└── run [4, 6)     ends = {c: 6}

`holdings` has the invariant, and what becomes of blocks behind a hole.

A holder finds its blocks by the engine's own hashes, which name up to 64 neighbours in a run
together. When a run is split, its lower part is its `tail`: names of blocks beyond the end of
their run lead to it.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from .holdings import cut, forget, mark, remove_copy, split_detached
from .runs import (
    MOST_NAMED,
    NAME_BYTES,
    Holder,
    NamedBlocks,
    Run,
    common_bytes,
    find_name,
    pack_name,
)

MOST_LOOKED_AT: Final = 200_000
"""Runs to look at for the holes that a message makes and fills: a fifth of a second at most."""


_MOST_BYTES: Final = MOST_NAMED * NAME_BYTES

GIVE_BACK: Final = 1 << 17
"""From so many blocks that were swept on their memory goes back to the system."""


class PrefixTree:
    """The tree of prefixes, with the holders of each."""

    def __init__(self) -> None:
        self.root = Run(0, 0, bytearray(), None)
        self.root.children = {}
        self.runs: dict[int, Run] = {0: self.root}
        self._clock = 0
        self.next_run = 1
        self.next_holder = 1
        self._leaving: list[Holder] = []
        self._swept = 0

    @property
    def run_count(self) -> int:
        """Stretches of blocks without a branch."""
        return len(self.runs) - 1

    # Holders --------------------------------------------------------------------------

    def add_holder(self) -> Holder:
        holder = Holder(self.next_holder)
        self.next_holder += 1
        return holder

    def drop_holder(self, holder: Holder) -> None:
        """Forget a holder; the memory comes back with `sweep`. Costs the same at any size."""
        self._leaving.append(holder)

    @property
    def is_swept(self) -> bool:
        return not self._leaving

    def sweep(self, limit: int) -> None:
        """Free about `limit` blocks of holders that were dropped."""
        while self._leaving and limit > 0:
            holder = self._leaving[-1]
            number = holder.number
            held = holder.held
            while held and limit > 0:
                _, named = held.popitem()
                limit -= 1
                self._swept += 1
                if not named.names:
                    continue
                run: Run | None = named.run
                end = named.end
                # Once for all of its names.
                named.names.clear()
                while run is not None and run.start < end:
                    if forget(run, number):
                        self.trim(run)
                    run = run.tail
            if not held:
                self._leaving.pop()
        if not self._leaving and self._swept >= GIVE_BACK:
            self._swept = 0
            _give_back()

    # Storing --------------------------------------------------------------------------

    def store(
        self,
        holder: Holder,
        parents: Sequence[int | None],
        bounds: Sequence[int],
        engine_hashes: list[int],
        blocks: bytes,
    ) -> list[int]:
        """Store chains of blocks, one after the other.

        Args:
            parents: for each chain, the engine's hash of the block before it; None for none.
            bounds: chain i has the blocks [bounds[i], bounds[i + 1]).
            engine_hashes: the engine's hash of each block.
            blocks: the block hashes, little-endian, 8 bytes each.

        Returns:
            The chains that were left out, since their parent is not held.
        """
        held = holder.held
        if len(set(engine_hashes)) < len(engine_hashes) or not held.keys().isdisjoint(
            engine_hashes
        ):
            return self._store_singly(holder, parents, bounds, engine_hashes, blocks)
        number = holder.number
        packed = array("Q", engine_hashes).tobytes()
        orphans: list[int] = []
        values: list[NamedBlocks] = []
        saved = 0  # blocks that are in `held` already
        named: NamedBlocks | None = None  # has `last`, at its end
        last: int | None = None  # the engine's hash of block `depth - 1` of `run`
        run, depth = self.root, 0
        start = bounds[0]
        for chain, parent in enumerate(parents):
            end = bounds[chain + 1]
            if start == end:
                continue
            if parent is None:
                run, depth, named = self.root, 0, None
            elif parent != last:
                if values:
                    held.update(zip(engine_hashes[saved:start], values, strict=True))
                    values.clear()
                saved = start
                named = held.get(parent)
                if named is None:
                    orphans.append(chain)
                    saved = start = end
                    last = None
                    continue
                run, depth = self.locate(named, parent)
                depth += 1
            names = packed[start * NAME_BYTES : end * NAME_BYTES]
            if (
                depth == run.end
                and run.children is None
                and run.ends.get(number) == depth
                and not holder.detached
            ):
                run.blocks += blocks[start * 8 : end * 8]
                run.end = run.ends[number] = depth + end - start
                run.stamp += 1
                named = _name(named, run, depth, names, values)
                depth = run.end
            else:
                run, depth, named = self._place(
                    holder, run, depth, blocks[start * 8 : end * 8], names, named, values
                )
            last = engine_hashes[end - 1]
            start = end
        held.update(zip(engine_hashes[saved:start], values, strict=True))
        return orphans

    def _store_singly(
        self,
        holder: Holder,
        parents: Sequence[int | None],
        bounds: Sequence[int],
        engine_hashes: list[int],
        blocks: bytes,
    ) -> list[int]:
        """Store block by block: some of the engine's hashes are held already, or come twice."""
        orphans: list[int] = []
        for chain, parent in enumerate(parents):
            if holder.looked_at > MOST_LOOKED_AT:
                break
            before = parent
            for at in range(bounds[chain], bounds[chain + 1]):
                engine_hash = engine_hashes[at]
                block = blocks[at * 8 : at * 8 + 8]
                if not self._holds_after(holder, before, engine_hash, block):
                    if engine_hash in holder.held:
                        self.remove(holder, [engine_hash])
                    if before is not None and before not in holder.held:
                        orphans.append(chain)
                        break
                    self._store_one(holder, before, engine_hash, block)
                before = engine_hash
        return orphans

    def _store_one(
        self, holder: Holder, before: int | None, engine_hash: int, block: bytes
    ) -> None:
        held = holder.held
        run, depth, named = self.root, 0, None
        if before is not None:
            named = held[before]
            run, depth = self.locate(named, before)
            depth += 1
        name = pack_name(engine_hash)
        _, _, held[engine_hash] = self._place(holder, run, depth, block, name, named, [])

    def _holds_after(
        self, holder: Holder, before: int | None, engine_hash: int, block: bytes
    ) -> bool:
        """True if this hash already names this very block after `before`."""
        if engine_hash not in holder.held or (before is not None and before not in holder.held):
            return False
        run, depth = self.locate(holder.held[engine_hash], engine_hash)
        at = (depth - run.start) * 8
        if not run.blocks.startswith(block, at):
            return False
        if before is None:
            return depth == 0
        if depth == 0:
            return False
        previous, previous_depth = self.locate(holder.held[before], before)
        if previous_depth != depth - 1:
            return False
        return previous is (run if depth > run.start else run.parent)

    def _place(
        self,
        holder: Holder,
        run: Run,
        depth: int,
        blocks: bytes,
        names: bytes,
        named: NamedBlocks | None,
        values: list[NamedBlocks],
    ) -> tuple[Run, int, NamedBlocks]:
        """Put `blocks` below block `depth - 1` of `run`, whatever is there already.

        Args:
            named: what has the name of block `depth - 1`.
            values: where the value of each name in `Holder.held` is added.

        Returns:
            The run of the last block, the depth below it, and what has its name.
        """
        number = holder.number
        connected = run is self.root or run.ends.get(number, -1) >= depth
        at, size = 0, len(blocks)
        while at < size:
            if depth == run.end:
                run = self._enter(run, blocks, at)
            offset = (depth - run.start) * 8
            length = min(len(run.blocks) - offset, size - at)
            theirs, ours = run.blocks[offset : offset + length], blocks[at : at + length]
            if not theirs.startswith(ours):
                length = common_bytes(theirs, ours)
            stop = depth + length // 8
            if length:
                mark(holder, run, depth, stop, connected)
                named = _name(named, run, depth, names[at : at + length], values)
            at += length
            depth = stop
            if at < size and depth < run.end:
                self._split(run, depth)
        assert named is not None
        return run, depth, named

    def _enter(self, run: Run, blocks: bytes, at: int) -> Run:
        """The run that holds `blocks[at:]` below the end of `run`, or at least begins so."""
        key = blocks[at : at + 8]
        if run.children is None:
            # A leaf goes on in place.
            run.blocks += blocks[at:]
            run.end += (len(blocks) - at) // 8
            return run
        child = run.children.get(key)
        if child is None:
            child = run.children[key] = self._new_run(run.end, bytearray(blocks[at:]), run)
        return child

    def _new_run(self, start: int, blocks: bytearray, parent: Run) -> Run:
        run = self.runs[self.next_run] = Run(self.next_run, start, blocks, parent)
        self.next_run += 1
        return run

    def _split(self, run: Run, at: int) -> None:
        """Cut a run in two before block `at`."""
        cut = (at - run.start) * 8
        lower = self._new_run(at, run.blocks[cut:], run)
        del run.blocks[cut:]
        run.end = at
        lower.touched = run.touched
        lower.children = run.children
        for child in (lower.children or {}).values():
            child.parent = lower
        lower.tail, run.tail = run.tail, lower
        run.children = {bytes(lower.blocks[:8]): lower}
        for number, end in run.ends.items():
            if end > at:
                lower.ends[number] = end
        for number in lower.ends:
            run.ends[number] = at
        run.stamp += 1
        if run.detached is not None:
            split_detached(run, lower, at)
        if run.copies is not None:
            lower.copies = {key: n for key, n in run.copies.items() if key[1] >= at} or None
            run.copies = {key: n for key, n in run.copies.items() if key[1] < at} or None

    # Removing -------------------------------------------------------------------------

    def remove(self, holder: Holder, engine_hashes: Sequence[int]) -> int:
        """Remove blocks in any order; returns how many of them the holder did not hold."""
        number = holder.number
        held = holder.held
        unknown = 0
        for engine_hash in engine_hashes:
            named = held.pop(engine_hash, None)
            if named is None:
                unknown += 1
                continue
            depth = named.start + find_name(named.names, pack_name(engine_hash))
            run = named.run
            if depth >= run.end:
                run = run_at(run, depth)
            forget_name(held, named, depth)
            if run.copies is not None and remove_copy(run, number, depth):
                continue
            last = run.ends.get(number) == depth + 1
            if last and (run.children is None or depth + 1 < run.end):
                if depth > run.start:
                    run.ends[number] = depth
                else:
                    del run.ends[number]
                run.stamp += 1
            else:
                cut(holder, run, depth)
            if depth + 1 == run.end and run.children is None:
                self.trim(run)
        return unknown

    def trim(self, run: Run) -> None:
        """Free what nobody holds at the end of a leaf, and the leaf with it."""
        while run.children is None and run.parent is not None:
            top = max(run.ends.values(), default=run.start)
            for spans in (run.detached or {}).values():
                top = max(top, spans[-1][1])
            if top > run.start:
                del run.blocks[(top - run.start) * 8 :]
                run.end = top
                return
            parent = run.parent
            assert parent.children is not None
            del self.runs[run.id]
            del parent.children[bytes(run.blocks[:8])]
            if parent.tail is run:
                parent.tail = None
            if not parent.children and parent is not self.root:
                parent.children = None
            run = parent

    # Finding --------------------------------------------------------------------------

    def locate(self, named: NamedBlocks, name: int) -> tuple[Run, int]:
        """The run and the depth of a block that has a name there."""
        named.run = run_at(named.run, named.start)
        depth = named.depth_of(name)
        return run_at(named.run, depth), depth

    def descend(self, blocks: bytes) -> tuple[list[Run], int]:
        """The runs that these blocks lead through, and how many of the blocks are in the tree.

        Args:
            blocks: block hashes, little-endian, 8 bytes each.
        """
        self._clock = clock = self._clock + 1
        path: list[Run] = []
        size = len(blocks)
        at = 0
        children = self.root.children
        while children is not None and at < size:
            run = children.get(blocks[at : at + 8])
            if run is None:
                break
            run.touched = clock
            path.append(run)
            theirs = run.blocks
            ours = blocks[at : at + len(theirs)]
            if not theirs.startswith(ours):
                return path, run.start + common_bytes(ours, theirs[: len(ours)]) // 8
            at += len(ours)
            children = run.children
        return path, at // 8

    def find(self, blocks: bytes) -> dict[int, int]:
        """The number of these blocks that each holder has from the first on, for those that have
        any."""
        path, end = self.descend(blocks)
        ends: dict[int, int] = {}
        for run in path:
            ends.update(run.ends)
        if path and path[-1].end > end:
            for number, held in path[-1].ends.items():
                ends[number] = min(held, end)
        return ends

    def by_level(self) -> Iterator[Run]:
        """All runs, each after its parent."""
        waiting = deque([self.root])
        while waiting:
            run = waiting.popleft()
            yield run
            waiting += (run.children or {}).values()


def _give_back() -> None:
    """Give memory that the C library keeps for later back to the system: glibc does not by itself.

    Costs about 7 ms for 50 MB.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))


def run_at(run: Run, depth: int) -> Run:
    """The run of a held block that was stored in `run`, or what it leads to."""
    while depth >= run.end:
        assert run.tail is not None
        run = run.tail
    return run


def forget_name(held: dict[int, NamedBlocks], named: NamedBlocks, depth: int) -> None:
    """Take one block from what has its name, and its neighbours if there are any above and below.

    Args:
        held: of the holder, without that name.
    """
    names = named.names
    at = (depth - named.start) * NAME_BYTES
    if at == 0:
        del names[:NAME_BYTES]
        named.start += 1
        return
    rest = names[at + NAME_BYTES :] if at + NAME_BYTES < len(names) else None
    del names[at:]
    if rest is not None:
        below = NamedBlocks(named.run, depth + 1, rest)
        held.update(dict.fromkeys(below.list_names(), below))


def _name(
    named: NamedBlocks | None, run: Run, depth: int, names: bytes, values: list[NamedBlocks]
) -> NamedBlocks:
    """Name the blocks of a run from `depth` on.

    Args:
        named: to go on with, where these blocks follow those that it has.
        values: where for each name what has it is added.

    Returns:
        What has the last name.
    """
    at, size = 0, len(names)
    if named is not None and named.run is run:
        before = named.names
        room = _MOST_BYTES - len(before)
        if room > 0 and named.start + len(before) // NAME_BYTES == depth:
            if room >= size:
                before += names
                values += [named] * (size // NAME_BYTES)
                return named
            before += names[:room]
            values += [named] * (room // NAME_BYTES)
            at = room
    for first in range(at, size, _MOST_BYTES):
        some = bytearray(names[first : first + _MOST_BYTES])
        named = NamedBlocks(run, depth + first // NAME_BYTES, some)
        values += [named] * (len(some) // NAME_BYTES)
    assert named is not None
    return named
