"""Look-ups, compiled: which cache holds how much of a prefix.

Every array and every reference to a tree that compiled code is given costs as much as a part
of a look-up. So `find` is given one array, of the addresses at which the others lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.radix.kernel import MANY

from .children import find_child
from .holdings import covering, end_of, spans_of
from .jit import NUMBERS, READ_ONLY_WORDS, TABLE, WORDS, Int, entry, inner, numba, types
from .lists import AT, SIZE, key_of, place_of, size_of, value_of, word
from .tree import BLOCKS, END, ENDS, FIELDS, PARENT, STAMP, TOUCHED, TREE, Runs, Tree

Words = NDArray[np.uint64]
Numbers = NDArray[np.int64]
Arrays = tuple[Runs, Runs, Words, Runs, Words, Numbers]

TIERS: Final = 4

_CHUNK: Final = 16
_NONE: Final = np.uint64(0)
_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.extending.intrinsic
_ARRAYS: Final = (TABLE, TABLE, WORDS, TABLE, WORDS, NUMBERS)
_NUMBERS_POINTER: Final = types.CPointer(types.int64)
_WORDS_POINTER: Final = types.CPointer(types.uint64)


@entry(types.Tuple(_ARRAYS)(TREE))
def arrays_of(tree: Tree) -> Arrays:
    """What `find` reads: the runs, their blocks, their rows, and the places of children."""
    blocks, rows = tree.blocks, tree.rows
    return tree.runs, blocks.table, blocks.words, rows.table, rows.words, tree.children


def places_of(arrays: Arrays) -> Numbers:
    """For each array its address and its length. It holds as long as the arrays live."""
    return np.array([[array.ctypes.data, len(array)] for array in arrays], dtype=np.int64).ravel()


@_intrinsic
def _numbers_at(_: Any, address: Any) -> Any:
    """The address of numbers as a pointer."""
    return _NUMBERS_POINTER(address), _as_pointer


@_intrinsic
def _words_at(_: Any, address: Any) -> Any:
    """The address of words as a pointer."""
    return _WORDS_POINTER(address), _as_pointer


def _as_pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


@inner
def _alike(words: Words, at: Int, query: Words, first: Int, count: Int) -> Int:
    """How many blocks are alike from the first on."""
    found = 0
    # A whole chunk at a time: that is done with a few wide instructions.
    while found + _CHUNK <= count:
        different = _NONE
        for offset in range(found, found + _CHUNK):
            different |= words[at + offset] ^ query[first + offset]
        if different != _NONE:
            break
        found += _CHUNK
    while found < count and words[at + found] == query[first + found]:
        found += 1
    return found


@inner
def _descend(
    query: Words, runs: Runs, table: Runs, words: Words, children: Numbers
) -> tuple[Int, Int]:
    """The last run that a prefix leads to, and how many of its blocks are in the tree."""
    runs[0, TOUCHED] += 1
    run, depth = 0, 0
    while depth < len(query):
        child = find_child(runs, table, words, children, run, query[depth])
        if not child:
            break
        run = child
        runs[run, TOUCHED] = runs[0, TOUCHED]
        count = min(runs[run, END], len(query)) - depth
        depth += _alike(words, table[runs[run, BLOCKS], AT], query, depth, count)
        if depth < runs[run, END]:
            break
    return run, depth


@inner
def _tell(
    runs: Runs, table: Runs, words: Words, last: Int, first: Int, depth: Int, found: Numbers
) -> Int:
    """Write down the holders of the runs from below `first` to `last`, the upper runs before.

    Args:
        table, words: of the tree's `rows`.
        depth: no end that is told is larger.
        found: room for holders in its first half, and for their ends in its second.

    Returns:
        How many; when there is room for less, nothing was written.
    """
    count = 0
    run = last
    while run != first:
        count += table[runs[run, ENDS], SIZE]
        run = runs[run, PARENT]
    half = len(found) // 2
    if count > half:
        return count
    place = count
    run = last
    while run != first:
        at = table[runs[run, ENDS], AT]
        for index in range(table[runs[run, ENDS], SIZE] - 1, -1, -1):
            place -= 1
            found[place] = key_of(words[at + index])
            found[half + place] = min(value_of(words[at + index]), depth)
        run = runs[run, PARENT]
    return count


@entry(types.UniTuple(types.int64, 5)(READ_ONLY_WORDS, NUMBERS, NUMBERS))
def find(query: Words, places: Numbers, found: Numbers) -> tuple[int, int, int, int, int]:
    """What is held of a prefix.

    Args:
        places: see `places_of`.
        found: see `_tell`.

    Returns:
        The run up to which what is held may be known from before, or 0; the largest stamp up
        to it; then how many holders of the runs below it there are, and the first of them with
        its end.
    """
    runs = numba.carray(_numbers_at(places[0]), (places[1], FIELDS))
    block_table = numba.carray(_numbers_at(places[2]), (places[3], 3))
    block_words = numba.carray(_words_at(places[4]), (places[5],))
    row_table = numba.carray(_numbers_at(places[6]), (places[7], 3))
    row_words = numba.carray(_words_at(places[8]), (places[9],))
    children = numba.carray(_numbers_at(places[10]), (places[11],))
    last, depth = _descend(query, runs, block_table, block_words, children)
    base = last if depth >= runs[last, END] else runs[last, PARENT]
    while base and row_table[runs[base, ENDS], SIZE] < MANY:
        base = runs[base, PARENT]
    stamp = 0
    run = base
    while run:
        stamp = max(stamp, runs[run, STAMP])
        run = runs[run, PARENT]
    count = _tell(runs, row_table, row_words, last, base, depth, found)
    return base, stamp, count, found[0], found[len(found) // 2]


@entry(types.UniTuple(types.int64, 2)(TREE, READ_ONLY_WORDS))
def descend(tree: Tree, query: Words) -> tuple[int, int]:
    """The last run that a prefix leads to, and how many of its blocks are in the tree."""
    blocks = tree.blocks
    return _descend(query, tree.runs, blocks.table, blocks.words, tree.children)


@entry(types.int64(TREE, types.int64, types.int64, NUMBERS))
def tell(tree: Tree, last: int, depth: int, found: Numbers) -> Int:
    """All holders of the runs from the root to one; see `_tell`."""
    return _tell(tree.runs, tree.rows.table, tree.rows.words, last, 0, depth, found)


@inner
def _nearest(tree: Tree, run: Int, holders: Numbers, depth: Int) -> tuple[Int, Int]:
    """The nearest tier that has a block, -1 for none, and up to where it is the nearest."""
    rows = tree.rows
    stop = tree.runs[run, END]
    for tier in range(TIERS):
        holder = holders[tier]
        if not holder:
            continue
        end = end_of(tree, run, holder)
        if depth < end:
            return tier, min(stop, end)
        spans = spans_of(tree, run, holder)
        if not spans:
            continue
        index = covering(rows, spans, depth)
        if index >= 0:
            return tier, min(stop, value_of(word(rows, spans, index)))
        # A farther tier counts only up to where this one has something again.
        index = place_of(rows, spans, depth)
        if index < size_of(rows, spans):
            stop = min(stop, key_of(word(rows, spans, index)))
    return -1, stop


@entry(TABLE(TREE, types.int64, types.int64, TABLE))
def count_tiers(tree: Tree, last: int, depth: int, holders: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many blocks ranks have in each tier, each block counted in the nearest.

    Args:
        last, depth: as `descend` tells them.
        holders: of shape [ranks, TIERS], 0 where a rank has none.

    Returns:
        An array of the shape of `holders`.
    """
    runs = tree.runs
    length = 0
    run = last
    while run:
        length += 1
        run = runs[run, PARENT]
    path = np.empty(length, dtype=np.int64)
    run = last
    for index in range(length - 1, -1, -1):
        path[index] = run
        run = runs[run, PARENT]
    counts = np.zeros((len(holders), TIERS), dtype=np.int64)
    for rank in range(len(holders)):
        at = 0
        for index in range(length):
            run = path[index]
            while at < min(runs[run, END], depth):
                tier, reached = _nearest(tree, run, holders[rank], at)
                if tier < 0:
                    break
                reached = min(reached, depth)
                counts[rank, tier] += reached - at
                at = reached
            if at < runs[run, END]:
                break
    return counts
