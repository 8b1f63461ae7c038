"""The blocks that one cache holds: a hash table from the engine's hashes to locations.

A location is `run << 32 | depth`, never 0. The table is an array of pairs with open
addressing; a removal moves those behind it back, so that it has no tombstones.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .jit import (
    WORDS,
    Int,
    Structure,
    StructureType,
    Word,
    entry,
    inner,
    mixed,
    structref,
    structure,
    types,
)

FIRST_PLACES: Final = 16
DOUBLED_BELOW: Final = 1 << 15
"""A table of so many places or more grows by half: its memory counts."""
Words = NDArray[np.uint64]

_32: Final = np.uint64(32)
_NONE: Final = np.uint64(0)


class _HeldType(StructureType):
    """The type of `Held` in compiled code."""


class Held(Structure):
    """What a cache holds.

    Attributes:
        number: of the cache, in the rows of runs. It is used again once the cache is swept.
        count: blocks by the engine's hashes.
        detached: blocks behind a hole.
        pairs: of shape [2 * places]: hash and location, which is 0 where there is none.
        places: for pairs.
        secret: makes it hard to find hashes that meet in one place.
        swept: places that were looked at since the cache left.
        looked_at: runs below a hole that was made or filled, since this was set to 0.
    """

    number: Int
    count: Int
    detached: Int
    pairs: Words
    places: Int
    secret: Word
    swept: Int
    looked_at: Int


HELD: Final = structure(
    _HeldType,
    Held,
    [
        ("number", types.int64),
        ("count", types.int64),
        ("detached", types.int64),
        ("pairs", WORDS),
        ("places", types.int64),
        ("secret", types.uint64),
        ("swept", types.int64),
        ("looked_at", types.int64),
    ],
)


@entry(HELD(types.int64, types.uint64))
def make_held(number: int, secret: Any) -> Held:
    """A cache that holds nothing."""
    held: Held = structref.new(HELD)
    held.number = number
    held.count = held.detached = held.swept = held.looked_at = 0
    held.places = FIRST_PLACES
    held.pairs = np.zeros(2 * FIRST_PLACES, dtype=np.uint64)
    held.secret = secret
    return held


@entry(types.UniTuple(types.int64, 2)(HELD))
def figures_of(held: Held) -> tuple[int, int]:
    """How many blocks are held, and how many of them behind a hole."""
    return held.count, held.detached


@inner
def _home(places: Int, secret: Word, engine_hash: Word) -> Int:
    """The place where the search for a hash begins."""
    spread = mixed(engine_hash ^ secret) >> _32
    return np.int64(spread * np.uint64(places) >> _32)


@inner
def place_in(pairs: Words, places: Int, secret: Word, engine_hash: Word) -> Int:
    """The place of a hash, or the free one where it would be."""
    place = _home(places, secret, engine_hash)
    while pairs[2 * place + 1] != _NONE and pairs[2 * place] != engine_hash:
        place += 1
        if place == places:
            place = 0
    return place


@inner
def location_of(held: Held, engine_hash: Word) -> Word:
    """Where the block of an engine's hash lies; 0 when it is not held."""
    pairs = held.pairs
    return pairs[2 * place_in(pairs, held.places, held.secret, engine_hash) + 1]


@inner
def put(held: Held, engine_hash: Word, location: Word) -> None:
    """Add a hash that is not there."""
    make_room(held, 1)
    _put(held, engine_hash, location)
    held.count += 1


@inner
def make_room(held: Held, count: Int) -> None:
    """Make sure that as many more can be added without replacing the table."""
    if (held.count + count) * 4 >= held.places * 3:
        more = held.places if held.places < DOUBLED_BELOW else held.places // 2
        resize(held, max(held.places + more, (held.count + count) * 4 // 3 + 2))


@inner
def _put(held: Held, engine_hash: Word, location: Word) -> None:
    pairs = held.pairs
    place = place_in(pairs, held.places, held.secret, engine_hash)
    pairs[2 * place], pairs[2 * place + 1] = engine_hash, location


@inner
def resize(held: Held, places: Int) -> None:
    old, count = held.pairs, held.places
    held.places = max(places, FIRST_PLACES)
    held.pairs = np.zeros(2 * held.places, dtype=np.uint64)
    for place in range(count):
        if old[2 * place + 1] != _NONE:
            _put(held, old[2 * place], old[2 * place + 1])


@inner
def pop(held: Held, engine_hash: Word) -> Word:
    """Remove a hash; returns its location, 0 when it is not held."""
    pairs, places = held.pairs, held.places
    place = place_in(pairs, places, held.secret, engine_hash)
    found = pairs[2 * place + 1]
    if found == _NONE:
        return found
    hole = place
    while True:
        place += 1
        if place == places:
            place = 0
        if pairs[2 * place + 1] == _NONE:
            break
        home = _home(places, held.secret, pairs[2 * place])
        # It may move to the hole unless its search begins behind it.
        if (place - home) % places >= (place - hole) % places:
            pairs[2 * hole], pairs[2 * hole + 1] = pairs[2 * place], pairs[2 * place + 1]
            hole = place
    pairs[2 * hole] = pairs[2 * hole + 1] = _NONE
    held.count -= 1
    if held.count * 4 < places and places > FIRST_PLACES:
        resize(held, held.count * 2)
    return found
