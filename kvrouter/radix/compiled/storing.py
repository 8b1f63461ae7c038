"""Storing and removing blocks by the hashes of the engine, compiled."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from .children import add_child, find_child
from .held import Held, location_of, make_room, place_in, pop, put
from .holdings import end_of, hold, let_go
from .jit import Int, Word, inner
from .lists import AT, ROOM, SIZE, place_in_rows, reserve, row, value_of
from .runs import append_block, new_run, run_of, split
from .tree import BLOCKS, CHILD, END, ENDS, PARENT, STAMP, START, Tree, block_at

Words = NDArray[np.uint64]

_NONE: Final = np.uint64(0)


@inner
def remove(tree: Tree, held: Held, engine_hash: Word) -> bool:
    """Remove a block; False when it is not held."""
    location = pop(held, engine_hash)
    if location == _NONE:
        return False
    let_go(tree, held, run_of(tree, location), value_of(location))
    return True


@inner
def store(
    tree: Tree,
    held: Held,
    has_parent: bool,
    parent: Word,
    engine_hashes: Words,
    blocks: Words,
) -> bool:
    """Store a chain of blocks, until one lacks its parent; returns whether all were stored."""
    before, has_before, is_known = parent, has_parent, not has_parent
    # The place of the block before, and whether everything up to it is held without a gap.
    run, depth, connected = np.int64(0), np.int64(-1), True
    index, may_go_on = 0, True
    while index < len(engine_hashes):
        if not is_known:
            is_known, run, depth, connected = _place_of(tree, held, before)
        if is_known and may_go_on and run and connected and not held.detached:
            count = _go_on(tree, held, run, depth + 1, engine_hashes[index:], blocks[index:])
            may_go_on = False
            if count:
                depth += count
                index += count
                before = engine_hashes[index - 1]
                continue
        engine_hash, block = engine_hashes[index], blocks[index]
        location = location_of(held, engine_hash)
        if location != _NONE and _follows(tree, held, location, has_before, before, block):
            is_known = False
        else:
            if location != _NONE:
                remove(tree, held, engine_hash)
                if has_before:
                    is_known, run, depth, connected = _place_of(tree, held, before)
            if not is_known:
                return False
            depth += 1
            run = _enter(tree, run, depth, block)
            hold(tree, held, run, depth, connected)
            put(held, engine_hash, row(run, depth))
        before, has_before, may_go_on = engine_hash, True, True
        index += 1
    return True


@inner
def _place_of(tree: Tree, held: Held, engine_hash: Word) -> tuple[bool, Int, Int, bool]:
    """Whether a block is held; its run and depth; whether everything up to it is held."""
    location = location_of(held, engine_hash)
    if location == _NONE:
        return False, np.int64(0), np.int64(0), False
    run, depth = run_of(tree, location), value_of(location)
    return True, run, depth, depth < end_of(tree, run, held.number)


@inner
def _go_on(
    tree: Tree, held: Held, run: Int, depth: Int, engine_hashes: Words, blocks: Words
) -> Int:
    """Store what follows in a run, as long as nothing special is met; returns how many blocks.

    The cache has all blocks before `depth`, and none behind a hole.
    """
    runs, rows, stored = tree.runs, tree.rows, tree.blocks
    fields, table, ends = runs[run], rows.table, rows.words
    own = place_in_rows(table, ends, fields[ENDS], held.number)
    if own == table[fields[ENDS], SIZE]:
        return 0
    own += table[fields[ENDS], AT]
    if ends[own] != row(held.number, depth):
        return 0
    count = len(engine_hashes)
    make_room(held, count)
    offset, number = depth - fields[START], fields[BLOCKS]
    is_leaf = not fields[CHILD]
    table = stored.table
    if is_leaf and offset + count > table[number, ROOM]:
        reserve(stored, number, offset + count)
    at, words = table[number, AT] + offset, stored.words
    there = min(fields[END] - depth, count)
    pairs, places, secret = held.pairs, held.places, held.secret
    found = 0
    while found < (count if is_leaf else there):
        if found < there and words[at + found] != blocks[found]:
            break
        place = place_in(pairs, places, secret, engine_hashes[found])
        if pairs[2 * place + 1] != _NONE:
            break
        pairs[2 * place], pairs[2 * place + 1] = engine_hashes[found], row(run, depth + found)
        words[at + found] = blocks[found]
        found += 1
    held.count += found
    if found > there:
        stored.live += depth + found - fields[END]
        table[number, SIZE] = offset + found
        fields[END] = depth + found
    if found:
        ends[own] = row(held.number, depth + found)
        tree.stamp += 1
        fields[STAMP] = tree.stamp
    return found


@inner
def _follows(
    tree: Tree,
    held: Held,
    location: Word,
    has_before: bool,
    before: Word,
    block: Word,
) -> bool:
    """Whether a block lies right below another that is held."""
    run, depth = run_of(tree, location), value_of(location)
    if block_at(tree, run, depth) != block:
        return False
    if not has_before:
        return bool(depth == 0)
    location = location_of(held, before)
    if location == _NONE or value_of(location) != depth - 1:
        return False
    above = tree.runs[run, PARENT] if depth == tree.runs[run, START] else run
    return bool(run_of(tree, location) == above)


@inner
def _enter(tree: Tree, run: Int, depth: Int, block: Word) -> Int:
    """The run in which `block` follows block `depth - 1` of a run, made when it is not there."""
    if depth < tree.runs[run, END]:
        if block_at(tree, run, depth) == block:
            return run
        split(tree, run, depth)
    elif run and not tree.runs[run, CHILD]:
        # A leaf goes on in place.
        append_block(tree, run, block)
        return run
    stored = tree.blocks
    child = find_child(tree.runs, stored.table, stored.words, tree.children, run, block)
    if not child:
        child = new_run(tree, depth, run)
        append_block(tree, child, block)
        add_child(tree, child)
    return child
