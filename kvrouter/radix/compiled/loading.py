"""Filling an empty tree with what a snapshot tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.radix.records import RunRecord

from .children import add_child
from .held import HELD, Held, put, resize
from .jit import READ_ONLY_WORDS, TABLE, WORDS, Int, entry, types
from .lists import append, row, set_value
from .runs import append_block, inner_list, new_run
from .tree import COPIES, DETACHED, END, ENDS, TAIL, TREE, Tree

Words = NDArray[np.uint64]
Rows = NDArray[np.int64]


@entry(types.int64(TREE, types.int64, READ_ONLY_WORDS))
def load_run(tree: Tree, parent: Int, blocks: Words) -> Int:
    """Add a run that nobody holds yet; returns its number."""
    run = new_run(tree, tree.runs[parent, END], parent)
    for block in blocks:
        append_block(tree, run, block)
    add_child(tree, run)
    return run


@entry(types.void(TREE, TABLE, TABLE, TABLE, TABLE))
def load_rows(tree: Tree, tails: Rows, ends: Rows, spans: Rows, copies: Rows) -> None:
    """Add what caches hold of runs.

    Args:
        tails: of shape [tails, 2]: run, tail.
        ends: of shape [ends, 3]: run, holder, end.
        spans: of shape [spans, 4]: run, holder, start, end; of one holder in their order.
        copies: of shape [copies, 4]: run, holder, depth, further names.
    """
    rows = tree.rows
    for index in range(len(tails)):
        tree.runs[tails[index, 0], TAIL] = tails[index, 1]
    for index in range(len(ends)):
        run, holder, end = ends[index, 0], ends[index, 1], ends[index, 2]
        set_value(rows, tree.runs[run, ENDS], holder, end)
    for index in range(len(spans)):
        run, holder = spans[index, 0], spans[index, 1]
        own = inner_list(tree, run, DETACHED, holder)
        append(rows, own, row(spans[index, 2], spans[index, 3]))
    for index in range(len(copies)):
        run, holder = copies[index, 0], copies[index, 1]
        own = inner_list(tree, run, COPIES, holder)
        set_value(rows, own, copies[index, 2], copies[index, 3])


@entry(types.void(HELD, WORDS, WORDS))
def load_held(held: Held, engine_hashes: Words, locations: Words) -> None:
    """Fill an empty cache."""
    resize(held, 2 * len(engine_hashes))
    for index in range(len(engine_hashes)):
        put(held, engine_hashes[index], locations[index])


@entry(types.void(HELD, types.int64))
def set_detached(held: Held, blocks: int) -> None:
    """Tell a cache how many of its blocks lie behind a hole."""
    held.detached = blocks


def load_runs(
    tree: Tree, records: Sequence[RunRecord], number_of: Mapping[int, int]
) -> dict[int, int]:
    """Add runs to an empty tree.

    Args:
        number_of: the number of each holder here, by that in the records.

    Returns:
        The number of each run here, by that in the records.
    """
    runs = {0: 0}
    tails: list[tuple[int, int]] = []
    ends: list[tuple[int, int, int]] = []
    spans: list[tuple[int, int, int, int]] = []
    copies: list[tuple[int, int, int, int]] = []
    for record in records:
        blocks = np.frombuffer(record.blocks, dtype="<u8")
        run = runs[record.number] = load_run(tree, runs[record.parent], blocks)
        ends += ((run, number_of[holder], end) for holder, end in record.ends.items())
        for holder, own in record.detached.items():
            spans += ((run, number_of[holder], start, end) for start, end in own)
        copies += ((run, number_of[holder], depth, n) for holder, depth, n in record.copies)
    tails += ((runs[one.number], runs[one.tail]) for one in records if one.tail)
    load_rows(tree, _table(tails, 2), _table(ends, 3), _table(spans, 4), _table(copies, 4))
    return runs


def _table(rows: Sequence[tuple[int, ...]], width: int) -> Rows:
    return np.array(rows, dtype=np.int64).reshape(len(rows), width)
