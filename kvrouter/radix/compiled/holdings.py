"""What one cache holds of one run, compiled: `kvrouter/radix/holdings.py` block by block.

The invariant is the same: a row (holder, end) of a run says that the holder has the blocks
[start, end) of it and all blocks before the run. Blocks behind a hole are `DETACHED` spans.
"""

from __future__ import annotations

from .held import Held
from .jit import Int, inner
from .lists import (
    Lists,
    delete,
    delete_key,
    insert,
    key_of,
    place_of,
    row,
    set_size,
    set_value,
    set_word,
    size_of,
    value_at,
    value_of,
    word,
)
from .runs import drop_empty, free_run, inner_list, stamp
from .tree import BLOCKS, CHILD, COPIES, DETACHED, END, ENDS, NEXT, PARENT, PENDING, START, Tree


@inner
def end_of(tree: Tree, run: Int, holder: Int) -> Int:
    """The end of what a holder has without a gap; the run's start for nothing."""
    end = value_at(tree.rows, tree.runs[run, ENDS], holder)
    return end if end >= 0 else tree.runs[run, START]


@inner
def spans_of(tree: Tree, run: Int, holder: Int) -> Int:
    """The list of what a holder has behind a hole; 0 for nothing."""
    outer = tree.runs[run, DETACHED]
    return max(value_at(tree.rows, outer, holder), 0) if outer else 0


@inner
def covering(rows: Lists, spans: Int, depth: Int) -> Int:
    """The index of the span that covers a depth; -1 for none."""
    index = place_of(rows, spans, depth + 1) - 1
    if index >= 0 and value_of(word(rows, spans, index)) > depth:
        return index
    return -1


# Holding ----------------------------------------------------------------------------


@inner
def hold(tree: Tree, held: Held, run: Int, depth: Int, connected: bool) -> None:
    """Note that a cache has a block.

    Args:
        connected: whether it has all blocks before it without a gap.
    """
    holder, rows = held.number, tree.rows
    end = end_of(tree, run, holder)
    spans = spans_of(tree, run, holder)
    if depth < end or (spans and covering(rows, spans, depth) >= 0):
        copies = inner_list(tree, run, COPIES, holder)
        set_value(rows, copies, depth, max(value_at(rows, copies, depth), 0) + 1)
        return
    if not connected:
        _add_span(rows, inner_list(tree, run, DETACHED, holder), depth, depth + 1)
        held.detached += 1
        return
    end = depth + 1
    if spans and key_of(word(rows, spans, 0)) == end:
        end = _take_first_span(tree, held, run, spans)
    set_value(rows, tree.runs[run, ENDS], holder, end)
    stamp(tree, run)
    if held.detached and end == tree.runs[run, END]:
        _attach_below(tree, held, run)


@inner
def _take_first_span(tree: Tree, held: Held, run: Int, spans: Int) -> Int:
    """Take what is no longer behind a hole; returns its end."""
    span = word(tree.rows, spans, 0)
    held.detached -= value_of(span) - key_of(span)
    delete(tree.rows, spans, 0)
    if not size_of(tree.rows, spans):
        drop_empty(tree, run, DETACHED)
    return value_of(span)


@inner
def _add_span(rows: Lists, spans: Int, start: Int, end: Int) -> None:
    """Cover [start, end), of which nothing is covered."""
    index = place_of(rows, spans, start)
    joins_next = index < size_of(rows, spans) and key_of(word(rows, spans, index)) == end
    if joins_next:
        end = value_of(word(rows, spans, index))
        delete(rows, spans, index)
    if index and value_of(word(rows, spans, index - 1)) == start:
        set_word(rows, spans, index - 1, row(key_of(word(rows, spans, index - 1)), end))
    else:
        insert(rows, spans, index, row(start, end))


@inner
def _attach_below(tree: Tree, held: Held, run: Int) -> None:
    """What the cache has right below a run that it now holds whole counts again."""
    holder, runs = held.number, tree.runs
    runs[run, PENDING] = 0
    pending = run
    while pending:
        whole = pending
        pending = runs[whole, PENDING]
        child = runs[whole, CHILD]
        while child:
            held.looked_at += 1
            spans = spans_of(tree, child, holder)
            if spans and key_of(word(tree.rows, spans, 0)) == runs[child, START]:
                end = _take_first_span(tree, held, child, spans)
                set_value(tree.rows, runs[child, ENDS], holder, end)
                stamp(tree, child)
                if end == runs[child, END]:
                    runs[child, PENDING] = pending
                    pending = child
            child = runs[child, NEXT]


# Letting go -------------------------------------------------------------------------


@inner
def let_go(tree: Tree, held: Held, run: Int, depth: Int) -> None:
    """Note that a cache lacks a block from now on, unless it has it by another name."""
    holder, rows, runs = held.number, tree.rows, tree.runs
    if runs[run, COPIES] and _remove_copy(tree, run, holder, depth):
        return
    end = end_of(tree, run, holder)
    if depth >= end:
        spans = spans_of(tree, run, holder)
        index = covering(rows, spans, depth) if spans else -1
        if index < 0:
            # Only what a forged snapshot says of a cache can be at odds with itself.
            return
        span = word(rows, spans, index)
        delete(rows, spans, index)
        if depth + 1 < value_of(span):
            insert(rows, spans, index, row(depth + 1, value_of(span)))
        if key_of(span) < depth:
            insert(rows, spans, index, row(key_of(span), depth))
        held.detached -= 1
        if not size_of(rows, spans):
            drop_empty(tree, run, DETACHED)
    else:
        if depth > runs[run, START]:
            set_value(rows, runs[run, ENDS], holder, depth)
        else:
            delete_key(rows, runs[run, ENDS], holder)
        stamp(tree, run)
        if depth + 1 < end:
            _add_span(rows, inner_list(tree, run, DETACHED, holder), depth + 1, end)
            held.detached += end - depth - 1
        if end == runs[run, END]:
            _detach_below(tree, held, run)
    if depth + 1 == runs[run, END] and not runs[run, CHILD]:
        trim(tree, run)


@inner
def _remove_copy(tree: Tree, run: Int, holder: Int, depth: Int) -> bool:
    """Take one of several names from a block; False if there is one only."""
    rows = tree.rows
    copies = value_at(rows, tree.runs[run, COPIES], holder)
    if copies < 0:
        return False
    count = value_at(rows, copies, depth)
    if count < 0:
        return False
    if count > 1:
        set_value(rows, copies, depth, count - 1)
    else:
        delete_key(rows, copies, depth)
        if not size_of(rows, copies):
            drop_empty(tree, run, COPIES)
    return True


@inner
def _detach_below(tree: Tree, held: Held, run: Int) -> None:
    """What the cache has right below a run that it no longer holds whole lies behind a hole."""
    holder, runs, rows = held.number, tree.runs, tree.rows
    runs[run, PENDING] = 0
    pending = run
    while pending:
        broken = pending
        pending = runs[broken, PENDING]
        child = runs[broken, CHILD]
        while child:
            held.looked_at += 1
            end = value_at(rows, runs[child, ENDS], holder)
            if end >= 0:
                delete_key(rows, runs[child, ENDS], holder)
                stamp(tree, child)
                spans = inner_list(tree, child, DETACHED, holder)
                _add_span(rows, spans, runs[child, START], end)
                held.detached += end - runs[child, START]
                if end == runs[child, END]:
                    runs[child, PENDING] = pending
                    pending = child
            child = runs[child, NEXT]


@inner
def forget(tree: Tree, run: Int, holder: Int) -> bool:
    """Forget a cache in a run; returns whether it was known there."""
    known = delete_key(tree.rows, tree.runs[run, ENDS], holder)
    if known:
        stamp(tree, run)
    known |= _forget_in(tree, run, DETACHED, holder)
    _forget_in(tree, run, COPIES, holder)
    return known


@inner
def _forget_in(tree: Tree, run: Int, field: Int, holder: Int) -> bool:
    rows, outer = tree.rows, tree.runs[run, field]
    own = value_at(rows, outer, holder) if outer else -1
    if own < 0:
        return False
    set_size(rows, own, 0)
    drop_empty(tree, run, field)
    return True


@inner
def trim(tree: Tree, run: Int) -> None:
    """Free what nobody holds at the end of a leaf, and the leaf with it."""
    rows = tree.rows
    while run and not tree.runs[run, CHILD]:
        fields = tree.runs[run]
        top = fields[START]
        for index in range(size_of(rows, fields[ENDS])):
            top = max(top, value_of(word(rows, fields[ENDS], index)))
        if fields[DETACHED]:
            for index in range(size_of(rows, fields[DETACHED])):
                spans = value_of(word(rows, fields[DETACHED], index))
                top = max(top, value_of(word(rows, spans, size_of(rows, spans) - 1)))
        if top > fields[START]:
            set_size(tree.blocks, fields[BLOCKS], top - fields[START])
            fields[END] = top
            return
        parent = fields[PARENT]
        free_run(tree, run)
        run = parent
