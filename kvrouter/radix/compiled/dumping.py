"""A compiled tree as the records of a snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.radix.records import RunRecord

from .finding import arrays_of
from .held import HELD, Held
from .jit import NUMBERS, WORDS, entry, types
from .lists import AT, SIZE, row, value_of
from .runs import run_of
from .tree import BLOCKS, CHILD, COPIES, DETACHED, ENDS, NEXT, PARENT, TAIL, TREE, Tree, block_at

Words = NDArray[np.uint64]

SLICE_RUNS: Final = 512
_NONE: Final = np.uint64(0)


@entry(types.Tuple((WORDS, WORDS, WORDS, types.int64))(TREE, HELD, types.int64, types.int64))
def contents_of(tree: Tree, held: Held, place: int, limit: int) -> tuple[Words, Words, Words, int]:
    """Up to `limit` held blocks from a place of the table on.

    Returns:
        The engine's hashes, the block hashes, the locations, and the place to go on from, -1
        at the end.
    """
    count = min(held.count, limit)
    engine_hashes = np.empty(count, dtype=np.uint64)
    blocks = np.empty(count, dtype=np.uint64)
    locations = np.empty(count, dtype=np.uint64)
    pairs, index = held.pairs, 0
    while place < held.places and index < count:
        location = pairs[2 * place + 1]
        if location != _NONE:
            run, depth = run_of(tree, location), value_of(location)
            engine_hashes[index] = pairs[2 * place]
            blocks[index] = block_at(tree, run, depth)
            locations[index] = row(run, depth)
            index += 1
        place += 1
    following = place if count and place < held.places else -1
    return engine_hashes[:index].copy(), blocks[:index].copy(), locations[:index].copy(), following


@entry(NUMBERS(TREE, types.int64, types.int64))
def runs_after(tree: Tree, run: int, limit: int) -> NDArray[np.int64]:
    """The next up to `limit` runs behind one, each after its parent."""
    runs = tree.runs
    found = np.empty(limit, dtype=np.int64)
    count = 0
    while count < limit:
        following = runs[run, CHILD]
        while not following and run:
            following = runs[run, NEXT]
            if not following:
                run = runs[run, PARENT]
        if not following:
            break
        found[count] = run = following
        count += 1
    return found[:count].copy()


def run_records(tree: Tree) -> Iterator[RunRecord]:
    """The records of all runs, each after its parent."""
    runs, blocks, block_words, rows, row_words, _ = arrays_of(tree)

    def pairs(number: int) -> list[tuple[int, int]]:
        at, size = int(rows[number, AT]), int(rows[number, SIZE])
        words: list[int] = row_words[at : at + size].tolist()
        return [(one >> 32, one & 0xFFFFFFFF) for one in words]

    def lists(number: int) -> list[tuple[int, list[tuple[int, int]]]]:
        return [(holder, pairs(own)) for holder, own in (pairs(number) if number else ())]

    last = 0
    while numbers := runs_after(tree, last, SLICE_RUNS).tolist():
        for last in numbers:
            fields = runs[last].tolist()
            at, size = blocks[fields[BLOCKS], AT], blocks[fields[BLOCKS], SIZE]
            yield RunRecord(
                last,
                fields[PARENT],
                fields[TAIL],
                block_words[at : at + size].astype("<u8", copy=False).tobytes(),
                dict(pairs(fields[ENDS])),
                dict(lists(fields[DETACHED])),
                [(holder, *pair) for holder, own in lists(fields[COPIES]) for pair in own],
            )
