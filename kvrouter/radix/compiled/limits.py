"""Giving back what caches held: those that left, and what was used the longest ago."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from .held import HELD, Held, resize
from .holdings import forget, spans_of, trim
from .jit import TABLE, Int, entry, inner, types
from .lists import add_list, give_back, key_of, make_lists, size_of, value_at, value_of, word
from .runs import run_of
from .tree import (
    BORN,
    CHILD,
    DETACHED,
    END,
    ENDS,
    FIRST_CHILDREN,
    FIRST_RUNS,
    FREE,
    NEXT,
    PARENT,
    START,
    TOUCHED,
    TREE,
    Runs,
    Tree,
)

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]

FLAGS: Final = types.boolean[::1]

RUN, HELD_BLOCKS, WAS_TOUCHED, WAS_BORN, HAD_END = 0, 1, 2, 3, 4
"""What is noted of a run that may be given up; but for its number as it was then."""
VICTIM_FIELDS: Final = 5

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


@inner
def _mark_holders(tree: Tree, run: Int, marks: Numbers, mark: Int) -> None:
    """Set the marks of all that hold something of a run."""
    rows, outer = tree.rows, tree.runs[run, DETACHED]
    for index in range(size_of(rows, tree.runs[run, ENDS])):
        marks[key_of(word(rows, tree.runs[run, ENDS], index))] = mark
    for index in range(size_of(rows, outer) if outer else 0):
        marks[key_of(word(rows, outer, index))] = mark


@inner
def _holds(tree: Tree, run: Int, holder: Int) -> bool:
    """Whether a cache holds something of a run."""
    if value_at(tree.rows, tree.runs[run, ENDS], holder) >= 0:
        return True
    return bool(spans_of(tree, run, holder))


@inner
def _holds_below(tree: Tree, run: Int, holder: Int) -> bool:
    """Whether a cache holds something right below a run."""
    child = tree.runs[run, CHILD]
    while child:
        if _holds(tree, child, holder):
            return True
        child = tree.runs[child, NEXT]
    return False


@entry(TABLE(TREE, FLAGS))
def runs_to_give_up(tree: Tree, is_counted: Flags) -> Runs:
    """The runs of which caches hold something and nothing below, of shape [runs, VICTIM_FIELDS].

    Args:
        is_counted: by the number of a cache, whether its blocks count.
    """
    runs, rows = tree.runs, tree.rows
    found = np.empty((tree.live, VICTIM_FIELDS), dtype=np.int64)
    # By the number of a cache, the last run below which it was seen to hold something.
    holds_below = np.zeros(len(is_counted), dtype=np.int64)
    count = 0
    for run in range(1, tree.used):
        if runs[run, PARENT] == FREE:
            continue
        child = runs[run, CHILD]
        while child:
            _mark_holders(tree, child, holds_below, run)
            child = runs[child, NEXT]
        blocks = 0
        for index in range(size_of(rows, runs[run, ENDS])):
            one = word(rows, runs[run, ENDS], index)
            if is_counted[key_of(one)] and holds_below[key_of(one)] != run:
                blocks += value_of(one) - runs[run, START]
        outer = runs[run, DETACHED]
        for index in range(size_of(rows, outer) if outer else 0):
            one = word(rows, outer, index)
            if is_counted[key_of(one)] and holds_below[key_of(one)] != run:
                blocks += _covered(tree, value_of(one))
        if blocks:
            found[count, RUN], found[count, HELD_BLOCKS] = run, blocks
            found[count, WAS_TOUCHED], found[count, WAS_BORN] = runs[run, TOUCHED], runs[run, BORN]
            found[count, HAD_END] = runs[run, END]
            count += 1
    return found[:count].copy()


@inner
def _is_as_chosen(tree: Tree, victim: Numbers) -> bool:
    """Whether a run is there still, and was not found and did not go on since."""
    if victim[RUN] >= tree.used:
        return False
    fields = tree.runs[victim[RUN]]
    return bool(
        fields[PARENT] != FREE
        and fields[BORN] == victim[WAS_BORN]
        and fields[TOUCHED] == victim[WAS_TOUCHED]
        and fields[END] <= victim[HAD_END]
    )


@inner
def _forget_names(tree: Tree, held: Held, is_own: Flags) -> Int:
    """Take the blocks of some runs from the names of a cache; returns how many it had before."""
    pairs, before = held.pairs, held.count
    for place in range(held.places):
        location = pairs[2 * place + 1]
        if location != _NONE and is_own[run_of(tree, location)]:
            pairs[2 * place + 1] = _NONE
            held.count -= 1
    # The search for the others must not end at the places that became free.
    resize(held, 2 * held.count)
    return before


@entry(types.int64(TREE, HELD, TABLE, types.int64))
def forget_runs(tree: Tree, held: Held, victims: Runs, most: Int) -> Int:
    """Forget what a cache has of runs, as `runs_to_give_up` told them, until that is `most` blocks
    or more; returns how many."""
    runs, rows, holder = tree.runs, tree.rows, held.number
    is_own = np.zeros(tree.used, dtype=np.bool_)
    own = np.empty(len(victims), dtype=np.int64)
    count = 0
    for index in range(len(victims)):
        run = victims[index, RUN]
        if most <= 0:
            break
        if not _is_as_chosen(tree, victims[index]):
            continue
        if _holds(tree, run, holder) and not _holds_below(tree, run, holder):
            is_own[run] = True
            own[count] = run
            count += 1
            spans = spans_of(tree, run, holder)
            detached = _covered(tree, spans) if spans else 0
            held.detached -= detached
            end = value_at(rows, runs[run, ENDS], holder)
            most -= detached + (end - runs[run, START] if end >= 0 else 0)
    if not count:
        return 0
    before = _forget_names(tree, held, is_own)
    for run in own[:count]:
        forget(tree, run, holder)
        trim(tree, run)
    give_back(tree.blocks)
    give_back(tree.rows)
    return before - held.count
