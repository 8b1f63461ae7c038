"""Messages of events, from wire bytes to applied. The form is that of `kvrouter/events.py`."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.radix.records import MOST_LOOKED_AT

from .held import HELD, Held
from .jit import NUMBERS, READ_ONLY_BYTES, Int, Word, entry, inner, types
from .storing import remove, store
from .tree import TREE, Tree

Bytes = NDArray[np.uint8]

HEADER_BYTES: Final = 40
VERSION: Final = 1
STORED, REMOVED, CLEARED, DIGEST = 0, 1, 2, 3
EXTERNAL: Final = 3
DIGEST_NUMBERS: Final = 2

EVENT, PARENT, ENGINE, BLOCK = 0, 1, 2, 3
"""How many events, parents, engine hashes and block hashes of a message are behind us."""
ORPHANS, UNKNOWN = 4, 5
"""How many chains lacked a parent, how many removed blocks were not held."""
ADDED: Final = 6
"""How many more blocks are held than before."""
LOOKED_AT: Final = 7
"""How many runs below holes were looked at."""
CURSOR_FIELDS: Final = 8

_8, _63 = np.uint64(8), np.uint64(63)


@inner
def _number(message: Bytes, at: Int, size: Int) -> Word:
    found = np.uint64(0)
    for offset in range(size - 1, -1, -1):
        found = found << _8 | np.uint64(message[at + offset])
    return found


@inner
def _int(message: Bytes, at: Int, size: Int) -> Int:
    return np.int64(_number(message, at, size))


@inner
def _places(message: Bytes) -> tuple[Int, Int, Int, Int]:
    """Where the counts, the parents, the engine hashes and the block hashes begin."""
    events = _int(message, 4, 4)
    counts = HEADER_BYTES + events + -events % 4
    parents = counts + 4 * events
    parents += -parents % 8
    engine = parents + 8 * _int(message, 24, 4)
    return counts, parents, engine, engine + 8 * _int(message, 28, 4)


@entry(
    types.Tuple((types.boolean, types.int64, types.uint64, types.uint64, types.int64))(
        READ_ONLY_BYTES
    )
)
def open_message(message: Bytes) -> tuple[bool, int, Any, Any, int]:
    """Whether it is a message of events; its rank, epoch, first id and number of events."""
    if len(message) < HEADER_BYTES or message[0] != VERSION:
        return False, 0, np.uint64(0), np.uint64(0), 0
    events, stored = _int(message, 4, 4), _int(message, 32, 4)
    counts_at, _, engine_at, blocks_at = _places(message)
    is_whole = blocks_at + 8 * stored == len(message)
    if is_whole:
        parents = blocks = stored_blocks = 0
        for event in range(events):
            code = message[HEADER_BYTES + event]
            count = _int(message, counts_at + 4 * event, 4)
            blocks += count
            parents += code >> 2 & 1
            if code & 3 == STORED:
                stored_blocks += count
            if code >> 3 > EXTERNAL or (code & 3 == DIGEST and count != DIGEST_NUMBERS):
                is_whole = False
        is_whole &= blocks == (blocks_at - engine_at) // 8 and parents == _int(message, 24, 4)
        is_whole &= stored in (blocks, stored_blocks)
        # An id behind the last that does not fit comes round.
        is_whole &= not _number(message, 8, 8) >> _63
        is_whole &= _number(message, 16, 8) + np.uint64(events) >= _number(message, 16, 8)
    return is_whole, _int(message, 2, 2), _number(message, 8, 8), _number(message, 16, 8), events


@entry(types.void(READ_ONLY_BYTES, NUMBERS, types.int64))
def skip_events(message: Bytes, cursor: NDArray[np.int64], count: int) -> None:
    """Move a cursor behind `count` further events."""
    counts_at = _places(message)[0]
    for event in range(cursor[EVENT], cursor[EVENT] + count):
        code = message[HEADER_BYTES + event]
        blocks = _int(message, counts_at + 4 * event, 4)
        cursor[PARENT] += code >> 2 & 1
        cursor[ENGINE] += blocks
        if code & 3 == STORED:
            cursor[BLOCK] += blocks
    cursor[EVENT] += count


@entry(types.int64(TREE, HELD, READ_ONLY_BYTES, NUMBERS))
def apply_events(tree: Tree, held: Held, message: Bytes, cursor: NDArray[np.int64]) -> Int:
    """Apply the events from a cursor on that store or remove blocks in the cursor's tier.

    The cursor is left at the first other one, or at the end.

    Returns:
        How often an array that look-ups read was replaced, since the tree was made.
    """
    counts_at, parents_at, engine_at, _ = _places(message)
    counts = message[counts_at : counts_at + 4 * _int(message, 4, 4)].view(np.uint32)
    numbers = message[parents_at:].view(np.uint64)
    engine_hashes = numbers[(engine_at - parents_at) // 8 :]
    blocks = engine_hashes[_int(message, 28, 4) :]
    event, parent, first, block = cursor[EVENT], cursor[PARENT], cursor[ENGINE], cursor[BLOCK]
    tier = message[HEADER_BYTES + event] >> 3
    before = held.count
    held.looked_at = cursor[LOOKED_AT]
    while event < len(counts) and held.looked_at <= MOST_LOOKED_AT:
        code = message[HEADER_BYTES + event]
        if code >> 3 != tier or code & 3 > REMOVED:
            break
        last = first + np.int64(counts[event])
        own = engine_hashes[first:last]
        has_parent = bool(code >> 2 & 1)
        if code & 3 == STORED:
            above = numbers[parent] if has_parent else np.uint64(0)
            if not store(tree, held, has_parent, above, own, blocks[block:]):
                cursor[ORPHANS] += 1
            block += last - first
        else:
            for engine_hash in own:
                if not remove(tree, held, engine_hash):
                    cursor[UNKNOWN] += 1
        event += 1
        parent += has_parent
        first = last
    cursor[EVENT], cursor[PARENT], cursor[ENGINE], cursor[BLOCK] = event, parent, first, block
    cursor[ADDED] += held.count - before
    cursor[LOOKED_AT] = held.looked_at
    return tree.growth + tree.blocks.growth + tree.rows.growth
