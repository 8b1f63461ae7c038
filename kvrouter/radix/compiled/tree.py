"""The compiled tree: what `PrefixTree` keeps in objects, in the rows of one array.

A run is a row of `runs`, known by its number; 0 is the root. A child is found by its parent
and its first block in `children`, an open-addressed table of the numbers of runs, and all
children of a run hang together by `NEXT` and `PREVIOUS`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from .jit import (
    NUMBERS,
    TABLE,
    Int,
    Structure,
    StructureType,
    Word,
    entry,
    inner,
    structref,
    structure,
    types,
)
from .lists import (
    LISTS,
    Lists,
    add_list,
    make_lists,
    word,
)

Runs = NDArray[np.int64]
Numbers = NDArray[np.int64]
Words = NDArray[np.uint64]

PARENT, START, END, TAIL = 0, 1, 2, 3
BLOCKS = 4
"""The list of its block hashes."""
ENDS = 5
"""The list of (holder, end of what it holds without a gap), in `rows`."""
DETACHED = 6
"""The list of (holder, list of (start, end) behind a hole), in `rows`; 0 for nothing."""
COPIES = 7
"""The list of (holder, list of (depth, further names)), in `rows`; 0 for nothing."""
CHILD, NEXT, PREVIOUS = 8, 9, 10
TOUCHED = 11
"""When it was last found; the root's is the clock."""
BORN = 12
"""Its place among all runs ever made; the root's is the secret of `children`."""
STAMP = 13
"""Grows whenever `ENDS` changes, and is never used twice."""
FAMILY = 14
"""With the first block it makes the place of a child in `children`; a split hands it down."""
PENDING = 15
"""The next run to look at, while several are waiting."""
FIELDS: Final = 16

FREE: Final = -1
FIRST_RUNS: Final = 64
FIRST_CHILDREN: Final = 64


class _TreeType(StructureType):
    """The type of `Tree` in compiled code."""


class Tree(Structure):
    """All runs.

    Attributes:
        runs: of shape [runs, FIELDS].
        blocks: the block hashes of each run.
        rows: what else lies in lists.
        children: places of children, 0 where there is none; their number is a power of two.
        live: runs, without the root.
        used: the number above all runs.
        free: the first of the numbers to use again; its `NEXT` is the next of them.
        born: runs ever made.
        stamp: the last that was given.
        growth: how often an array was replaced.
    """

    runs: Runs
    blocks: Lists
    rows: Lists
    children: Numbers
    live: Int
    used: Int
    free: Int
    born: Int
    stamp: Int
    growth: Int


TREE: Final = structure(
    _TreeType,
    Tree,
    [
        ("runs", TABLE),
        ("blocks", LISTS),
        ("rows", LISTS),
        ("children", NUMBERS),
        ("live", types.int64),
        ("used", types.int64),
        ("free", types.int64),
        ("born", types.int64),
        ("stamp", types.int64),
        ("growth", types.int64),
    ],
)


@entry(TREE(types.int64))
def make_tree(secret: int) -> Tree:
    """A tree of the root alone.

    Args:
        secret: makes it hard to find blocks that meet in one place of `children`.
    """
    tree: Tree = structref.new(TREE)
    tree.runs = np.zeros((FIRST_RUNS, FIELDS), dtype=np.int64)
    tree.blocks = make_lists()
    tree.rows = make_lists()
    tree.children = np.zeros(FIRST_CHILDREN, dtype=np.int64)
    tree.used = 1
    tree.live = tree.free = tree.born = tree.stamp = tree.growth = 0
    tree.runs[0, BORN] = secret
    tree.runs[0, ENDS] = add_list(tree.rows, 0)
    return tree


@entry(types.int64(TREE))
def count_runs(tree: Tree) -> Int:
    """How many runs there are besides the root."""
    return tree.live


@inner
def block_at(tree: Tree, run: Int, depth: Int) -> Word:
    return word(tree.blocks, tree.runs[run, BLOCKS], depth - tree.runs[run, START])
