"""Giving back what caches held: those that left, and what was used the longest ago."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from .held import HELD, Held, resize
from .holdings import forget, trim
from .jit import NUMBERS, TABLE, Int, entry, inner, types
from .lists import add_list, give_back, key_of, make_lists, set_size, size_of, value_of, word
from .runs import free_rows, run_of
from .tree import (
    CHILD,
    COPIES,
    DETACHED,
    ENDS,
    FIRST_CHILDREN,
    FIRST_RUNS,
    FREE,
    PARENT,
    START,
    TREE,
    Runs,
    Tree,
)

Numbers = NDArray[np.int64]

_NONE: Final = np.uint64(0)


@entry(types.UniTuple(types.int64, 2)(TREE, HELD, types.int64))
def sweep(tree: Tree, held: Held, limit: int) -> tuple[int, int]:
    """Free up to `limit` blocks of a cache that left.

    Returns:
        How many were freed, and how many are left.
    """
    freed = 0
    pairs = held.pairs
    while held.count and freed < limit:
        location = pairs[2 * held.swept + 1]
        held.swept += 1
        if location == _NONE:
            continue
        freed += 1
        held.count -= 1
        run = run_of(tree, location)
        if run and forget(tree, run, held.number):
            trim(tree, run)
    if not held.count:
        give_back(tree.blocks)
        give_back(tree.rows)
    return freed, held.count


@entry(types.void(TREE))
def shrink(tree: Tree) -> None:
    """Give back the memory of a tree without runs."""
    if tree.live:
        return
    root = tree.runs[0].copy()
    tree.runs = np.zeros((FIRST_RUNS, len(root)), dtype=np.int64)
    tree.runs[0] = root
    tree.children = np.zeros(FIRST_CHILDREN, dtype=np.int64)
    tree.used, tree.free = 1, 0
    tree.growth += tree.blocks.growth + tree.rows.growth + 1
    tree.blocks = make_lists()
    tree.rows = make_lists()
    tree.runs[0, ENDS] = add_list(tree.rows, 0)


@inner
def _covered(tree: Tree, spans: Int) -> Int:
    count = 0
    for index in range(size_of(tree.rows, spans)):
        span = word(tree.rows, spans, index)
        count += value_of(span) - key_of(span)
    return count


@entry(TABLE(TREE))
def leaves_of(tree: Tree) -> Runs:
    """The fields of each leaf, with its number for its parent and its blocks for its start.

    A block counts once for each cache that holds it.
    """
    runs, rows = tree.runs, tree.rows
    found = np.empty((tree.live, runs.shape[1]), dtype=np.int64)
    count = 0
    for run in range(1, tree.used):
        if runs[run, PARENT] == FREE or runs[run, CHILD]:
            continue
        blocks = 0
        for index in range(size_of(rows, runs[run, ENDS])):
            blocks += value_of(word(rows, runs[run, ENDS], index)) - runs[run, START]
        outer = runs[run, DETACHED]
        for index in range(size_of(rows, outer) if outer else 0):
            blocks += _covered(tree, value_of(word(rows, outer, index)))
        found[count] = runs[run]
        found[count, PARENT], found[count, START] = run, blocks
        count += 1
    return found[:count].copy()


@entry(TABLE(TREE, NUMBERS))
def detached_in(tree: Tree, victims: Numbers) -> Runs:
    """Which caches have how many blocks behind a hole in some runs; of shape [caches, 2]."""
    rows, count = tree.rows, 0
    for run in victims:
        outer = tree.runs[run, DETACHED]
        count += size_of(rows, outer) if outer else 0
    found = np.empty((count, 2), dtype=np.int64)
    for run in victims:
        outer = tree.runs[run, DETACHED]
        for index in range(size_of(rows, outer) if outer else 0):
            count -= 1
            one = word(rows, outer, index)
            found[count, 0], found[count, 1] = key_of(one), _covered(tree, value_of(one))
    return found


@entry(types.int64(TREE, HELD, types.boolean[::1], types.int64))
def forget_runs(tree: Tree, held: Held, is_victim: NDArray[np.bool_], detached: int) -> Int:
    """Take the blocks of some runs from a cache, `detached` of them behind a hole.

    Returns:
        How many.
    """
    pairs, before = held.pairs, held.count
    for place in range(held.places):
        location = pairs[2 * place + 1]
        if location != _NONE and is_victim[run_of(tree, location)]:
            pairs[2 * place + 1] = _NONE
            held.count -= 1
    if held.count < before:
        # The search for the others must not end at the places that became free.
        resize(held, 2 * held.count)
        held.detached -= detached
    return before - held.count


@entry(types.void(TREE, NUMBERS))
def free_runs(tree: Tree, victims: Numbers) -> None:
    """Free leaves whose blocks no cache has any more."""
    for run in victims:
        set_size(tree.rows, tree.runs[run, ENDS], 0)
        free_rows(tree, run, DETACHED)
        free_rows(tree, run, COPIES)
        trim(tree, run)
    give_back(tree.blocks)
    give_back(tree.rows)
