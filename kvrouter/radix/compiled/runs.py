"""Runs, their blocks, and how they are cut in two."""

from __future__ import annotations

import numpy as np

from .children import add_child, remove_child
from .jit import (
    Int,
    Word,
    inner,
)
from .lists import (
    add_list,
    append,
    delete,
    free_list,
    grown_table,
    insert,
    key_of,
    place_of,
    row,
    set_size,
    set_word,
    size_of,
    value_of,
    word,
)
from .tree import (
    BLOCKS,
    BORN,
    CHILD,
    COPIES,
    DETACHED,
    END,
    ENDS,
    FAMILY,
    FREE,
    NEXT,
    PARENT,
    STAMP,
    START,
    TAIL,
    TOUCHED,
    Tree,
)

# Runs -------------------------------------------------------------------------------


@inner
def new_run(tree: Tree, start: Int, parent: Int) -> Int:
    """A run without blocks; it is no child of `parent` before `add_child`."""
    run = tree.free
    if run:
        tree.free = tree.runs[run, NEXT]
        tree.runs[run, :] = 0
    else:
        run = tree.used
        tree.used += 1
        if run == len(tree.runs):
            tree.runs = grown_table(tree.runs)
            tree.growth += 1
    tree.live += 1
    tree.born += 1
    fields = tree.runs[run]
    fields[PARENT] = parent
    fields[START] = fields[END] = start
    fields[BORN] = fields[FAMILY] = tree.born
    fields[BLOCKS] = add_list(tree.blocks, 0)
    fields[ENDS] = add_list(tree.rows, 0)
    stamp(tree, run)
    return run


@inner
def stamp(tree: Tree, run: Int) -> None:
    """Note that what is held of a run changed."""
    tree.stamp += 1
    tree.runs[run, STAMP] = tree.stamp


@inner
def append_block(tree: Tree, run: Int, block: Word) -> None:
    append(tree.blocks, tree.runs[run, BLOCKS], block)
    tree.runs[run, END] += 1


@inner
def run_of(tree: Tree, location: Word) -> Int:
    """The run of a location, 0 when it is no longer there."""
    runs = tree.runs
    run, depth = key_of(location), value_of(location)
    while depth >= runs[run, END]:
        run = runs[run, TAIL]
        if not run:
            break
    return 0 if runs[run, PARENT] == FREE else run


@inner
def free_run(tree: Tree, run: Int) -> None:
    """Free a leaf that nobody holds."""
    runs = tree.runs
    parent = runs[run, PARENT]
    remove_child(tree, run)
    if runs[parent, TAIL] == run:
        runs[parent, TAIL] = 0
    free_list(tree.blocks, runs[run, BLOCKS])
    free_list(tree.rows, runs[run, ENDS])
    free_rows(tree, run, DETACHED)
    free_rows(tree, run, COPIES)
    runs[run, PARENT] = FREE
    # Whoever comes with an old location finds nothing.
    runs[run, END] = np.int64(1) << 62
    runs[run, NEXT] = tree.free
    tree.free = run
    tree.live -= 1


@inner
def free_rows(tree: Tree, run: Int, field: Int) -> None:
    """Free a list of lists."""
    outer = tree.runs[run, field]
    if outer:
        for index in range(size_of(tree.rows, outer)):
            free_list(tree.rows, value_of(word(tree.rows, outer, index)))
        free_list(tree.rows, outer)
        tree.runs[run, field] = 0


@inner
def split(tree: Tree, run: Int, at: Int) -> Int:
    """Cut a run in two before block `at`; returns the lower part."""
    lower = new_run(tree, at, run)
    runs = tree.runs
    upper_blocks, lower_blocks = runs[run, BLOCKS], runs[lower, BLOCKS]
    kept = at - runs[run, START]
    for index in range(kept, size_of(tree.blocks, upper_blocks)):
        append(tree.blocks, lower_blocks, word(tree.blocks, upper_blocks, index))
    set_size(tree.blocks, upper_blocks, kept)
    runs[lower, END], runs[run, END] = runs[run, END], at
    runs[lower, TOUCHED] = runs[run, TOUCHED]
    child = runs[lower, CHILD] = runs[run, CHILD]
    while child:
        runs[child, PARENT] = lower
        child = runs[child, NEXT]
    runs[lower, TAIL], runs[run, TAIL] = runs[run, TAIL], lower
    runs[lower, FAMILY], runs[run, FAMILY] = runs[run, FAMILY], runs[lower, FAMILY]
    runs[run, CHILD] = 0
    add_child(tree, lower)
    _split_ends(tree, runs[run, ENDS], runs[lower, ENDS], at)
    _split_spans(tree, run, lower, at)
    _split_copies(tree, run, lower, at)
    stamp(tree, run)
    return lower


@inner
def _split_ends(tree: Tree, upper: Int, lower: Int, at: Int) -> None:
    rows = tree.rows
    for index in range(size_of(rows, upper)):
        one = word(rows, upper, index)
        if value_of(one) > at:
            append(rows, lower, one)
            set_word(rows, upper, index, row(key_of(one), at))


@inner
def _split_spans(tree: Tree, run: Int, lower: Int, at: Int) -> None:
    rows, outer = tree.rows, tree.runs[run, DETACHED]
    if not outer:
        return
    for index in range(size_of(rows, outer)):
        holder = key_of(word(rows, outer, index))
        spans = value_of(word(rows, outer, index))
        kept = size_of(rows, spans)
        first = kept
        while first and value_of(word(rows, spans, first - 1)) > at:
            first -= 1
        for place in range(first, kept):
            span = word(rows, spans, place)
            append(
                rows,
                inner_list(tree, lower, DETACHED, holder),
                row(max(key_of(span), at), value_of(span)),
            )
        if first < kept and key_of(word(rows, spans, first)) < at:
            set_word(rows, spans, first, row(key_of(word(rows, spans, first)), at))
            first += 1
        set_size(rows, spans, first)
    drop_empty(tree, run, DETACHED)


@inner
def _split_copies(tree: Tree, run: Int, lower: Int, at: Int) -> None:
    rows, outer = tree.rows, tree.runs[run, COPIES]
    if not outer:
        return
    for index in range(size_of(rows, outer)):
        holder = key_of(word(rows, outer, index))
        copies = value_of(word(rows, outer, index))
        first = place_of(rows, copies, at)
        for place in range(first, size_of(rows, copies)):
            append(rows, inner_list(tree, lower, COPIES, holder), word(rows, copies, place))
        set_size(rows, copies, first)
    drop_empty(tree, run, COPIES)


# Lists of lists ---------------------------------------------------------------------


@inner
def inner_list(tree: Tree, run: Int, field: Int, holder: Int) -> Int:
    """The holder's own list in a list of lists of a run, made when it is not there."""
    rows = tree.rows
    outer = tree.runs[run, field]
    if not outer:
        outer = tree.runs[run, field] = add_list(rows, 1)
    index = place_of(rows, outer, holder)
    if index < size_of(rows, outer):
        found = word(rows, outer, index)
        if key_of(found) == holder:
            return value_of(found)
    made = add_list(rows, 1)
    insert(rows, outer, index, row(holder, made))
    return made


@inner
def drop_empty(tree: Tree, run: Int, field: Int) -> None:
    """Free the empty lists in a list of lists of a run, and that list when it is empty."""
    rows = tree.rows
    outer = tree.runs[run, field]
    for index in range(size_of(rows, outer) - 1, -1, -1):
        own = value_of(word(rows, outer, index))
        if not size_of(rows, own):
            free_list(rows, own)
            delete(rows, outer, index)
    if not size_of(rows, outer):
        free_list(rows, outer)
        tree.runs[run, field] = 0
