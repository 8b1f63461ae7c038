"""The children of runs: by their first block, and one after the other."""

from __future__ import annotations

import numpy as np

from .jit import (
    Int,
    Word,
    inner,
    mixed,
)
from .lists import (
    AT,
)
from .tree import (
    BLOCKS,
    BORN,
    CHILD,
    FAMILY,
    NEXT,
    PARENT,
    PREVIOUS,
    START,
    Numbers,
    Runs,
    Tree,
    Words,
    block_at,
)


@inner
def _place_of_child(runs: Runs, children: Numbers, parent: Int, block: Word) -> Int:
    """Where the search for a child begins."""
    family = np.uint64(runs[parent, FAMILY]) + np.uint64(runs[0, BORN])
    return np.int64(mixed(block ^ mixed(family)) & np.uint64(len(children) - 1))


@inner
def find_child(
    runs: Runs, table: Runs, words: Words, children: Numbers, parent: Int, block: Word
) -> Int:
    """The child that begins with a block; 0 for none.

    Args:
        table, words: of the tree's `blocks`.
    """
    place = _place_of_child(runs, children, parent, block)
    while True:
        run = children[place]
        if not run:
            return 0
        if runs[run, PARENT] == parent and words[table[runs[run, BLOCKS], AT]] == block:
            return run
        place = (place + 1) & (len(children) - 1)


@inner
def _home_of(tree: Tree, run: Int) -> Int:
    parent, start = tree.runs[run, PARENT], tree.runs[run, START]
    return _place_of_child(tree.runs, tree.children, parent, block_at(tree, run, start))


@inner
def add_child(tree: Tree, run: Int) -> None:
    """Make a run with its first block known to its parent."""
    runs = tree.runs
    parent = runs[run, PARENT]
    after = runs[parent, CHILD]
    runs[run, NEXT], runs[run, PREVIOUS] = after, 0
    if after:
        runs[after, PREVIOUS] = run
    runs[parent, CHILD] = run
    if tree.live * 2 > len(tree.children):
        _rehash(tree, 4 * len(tree.children), run)
    _place(tree, run)


@inner
def _place(tree: Tree, run: Int) -> None:
    children = tree.children
    place = _home_of(tree, run)
    while children[place]:
        place = (place + 1) & (len(children) - 1)
    children[place] = run


@inner
def _rehash(tree: Tree, places: Int, besides: Int) -> None:
    """Place all children anew but for one."""
    old = tree.children
    tree.children = np.zeros(places, dtype=np.int64)
    tree.growth += 1
    for run in old:
        if run and run != besides:
            _place(tree, run)


@inner
def remove_child(tree: Tree, run: Int) -> None:
    runs = tree.runs
    before, after = runs[run, PREVIOUS], runs[run, NEXT]
    if before:
        runs[before, NEXT] = after
    else:
        runs[runs[run, PARENT], CHILD] = after
    if after:
        runs[after, PREVIOUS] = before
    children = tree.children
    last = len(children) - 1
    hole = _home_of(tree, run)
    while children[hole] != run:
        hole = (hole + 1) & last
    place = hole
    while True:
        place = (place + 1) & last
        if not children[place]:
            break
        home = _home_of(tree, children[place])
        # It may move to the hole unless its search begins behind it.
        if (place - home) & last >= (place - hole) & last:
            children[hole] = children[place]
            hole = place
    children[hole] = 0
