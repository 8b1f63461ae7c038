"""Many lists of 64-bit words in one array.

A list has a number above 0; 0 stands for no list. Its words lie side by side in `words`; one
that outgrows its room moves to the end. When the array is full and much of it is in no list,
the lists move together.

A row is a word with a key in the upper and a value in the lower half. Lists of rows are
sorted by their keys, each of which is there once.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from .jit import (
    TABLE,
    WORDS,
    Int,
    Structure,
    StructureType,
    Word,
    inner,
    structref,
    structure,
    types,
)

Words = NDArray[np.uint64]

AT, SIZE, ROOM = 0, 1, 2
FIRST_WORDS: Final = 1024
FIRST_LISTS: Final = 64
GROWTH: Final = 1.5
DENSE: Final = 0.6
"""From this part in lists on, a full array grows; below it, the lists move together."""

_32: Final = np.uint64(32)
_LOW: Final = np.uint64(0xFFFFFFFF)


class _ListsType(StructureType):
    """The type of `Lists` in compiled code."""


class Lists(Structure):
    """The lists, and the array in which they lie.

    Attributes:
        table: of shape [lists, 3]: where each begins, its size, its room.
        end: of the part of `words` that was given out.
        live: how many words are in lists.
        used: the number above all lists.
        free: the first of the numbers to use again; its `AT` is the next of them.
        growth: how often an array was replaced.
    """

    words: Words
    table: NDArray[np.int64]
    end: Int
    live: Int
    used: Int
    free: Int
    growth: Int


LISTS: Final = structure(
    _ListsType,
    Lists,
    [
        ("words", WORDS),
        ("table", TABLE),
        ("end", types.int64),
        ("live", types.int64),
        ("used", types.int64),
        ("free", types.int64),
        ("growth", types.int64),
    ],
)


@inner
def make_lists() -> Lists:
    lists: Lists = structref.new(LISTS)
    lists.words = np.empty(FIRST_WORDS, dtype=np.uint64)
    lists.table = np.zeros((FIRST_LISTS, 3), dtype=np.int64)
    lists.end = lists.live = lists.free = lists.growth = 0
    lists.used = 1
    return lists


@inner
def add_list(lists: Lists, room: Int) -> Int:
    """A new list that is empty; returns its number."""
    found = lists.free
    if found:
        lists.free = lists.table[found, AT]
    else:
        found = lists.used
        lists.used += 1
        if found == len(lists.table):
            lists.table = grown_table(lists.table)
            lists.growth += 1
    lists.table[found, AT] = lists.table[found, SIZE] = lists.table[found, ROOM] = 0
    if room:
        reserve(lists, found, room)
    return found


@inner
def grown_table(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """A copy with room for more rows, which are zero."""
    grown = np.zeros((int(len(table) * GROWTH) + 1, table.shape[1]), dtype=np.int64)
    grown[: len(table)] = table
    return grown


@inner
def free_list(lists: Lists, number: Int) -> None:
    lists.live -= lists.table[number, SIZE]
    lists.table[number, SIZE] = 0
    lists.table[number, AT] = lists.free
    # It tells the free numbers from empty lists.
    lists.table[number, ROOM] = -1
    lists.free = number


@inner
def reserve(lists: Lists, number: Int, room: Int) -> None:
    """Make sure that a list can have `room` words without moving."""
    table = lists.table
    if room <= table[number, ROOM]:
        return
    at, size = table[number, AT], table[number, SIZE]
    if at + table[number, ROOM] != lists.end or not table[number, ROOM]:
        # Elsewhere: it is likely to grow again.
        room = max(room, size + size // 2)
        at = lists.end
    if at + room > len(lists.words):
        _make_room(lists, room)
        at = lists.end
    if at != table[number, AT]:
        old = table[number, AT]
        words = lists.words
        for offset in range(size):
            words[at + offset] = words[old + offset]
        table[number, AT] = at
    table[number, ROOM] = room
    lists.end = at + room


@inner
def _make_room(lists: Lists, room: Int) -> None:
    """Move the lists together, into an array that has `room` words behind them."""
    capacity = len(lists.words)
    if lists.live + room > capacity * DENSE:
        capacity = max(int(capacity * GROWTH), int((lists.live + room) * GROWTH))
    move_together(lists, capacity)


@inner
def move_together(lists: Lists, capacity: Int) -> None:
    old = lists.words
    words = np.empty(capacity, dtype=np.uint64)
    table = lists.table
    end = 0
    for number in range(1, lists.used):
        at, size = table[number, AT], table[number, SIZE]
        if table[number, ROOM] < 0:
            continue
        for offset in range(size):
            words[end + offset] = old[at + offset]
        table[number, AT], table[number, ROOM] = end, size
        end += size
    lists.words = words
    lists.end = end
    lists.growth += 1


@inner
def give_back(lists: Lists) -> None:
    """Give memory back when most of it is in no list."""
    # To move the lists together costs a look at each number: never for less words than those.
    least = max(FIRST_WORDS, lists.used)
    if lists.end > least and lists.live * 4 < lists.end:
        move_together(lists, max(least, lists.live * 2))


@inner
def size_of(lists: Lists, number: Int) -> Int:
    return lists.table[number, SIZE]


@inner
def word(lists: Lists, number: Int, index: Int) -> Word:
    return lists.words[lists.table[number, AT] + index]


@inner
def set_word(lists: Lists, number: Int, index: Int, value: Word) -> None:
    lists.words[lists.table[number, AT] + index] = value


@inner
def insert(lists: Lists, number: Int, index: Int, value: Word) -> None:
    """Put a word before that at `index`."""
    size = lists.table[number, SIZE]
    reserve(lists, number, size + 1)
    at, words = lists.table[number, AT], lists.words
    for place in range(at + size, at + index, -1):
        words[place] = words[place - 1]
    words[at + index] = value
    lists.table[number, SIZE] = size + 1
    lists.live += 1


@inner
def append(lists: Lists, number: Int, value: Word) -> None:
    size = lists.table[number, SIZE]
    reserve(lists, number, size + 1)
    lists.words[lists.table[number, AT] + size] = value
    set_size(lists, number, size + 1)


@inner
def delete(lists: Lists, number: Int, index: Int) -> None:
    at, size, words = lists.table[number, AT], lists.table[number, SIZE], lists.words
    for place in range(at + index, at + size - 1):
        words[place] = words[place + 1]
    lists.table[number, SIZE] = size - 1
    lists.live -= 1


@inner
def set_size(lists: Lists, number: Int, size: Int) -> None:
    """Give a list another size, within its room."""
    lists.live += size - lists.table[number, SIZE]
    lists.table[number, SIZE] = size


# Rows -------------------------------------------------------------------------------


@inner
def row(key: Int, value: Int) -> Word:
    return np.uint64(key) << _32 | np.uint64(value)


@inner
def key_of(one: Word) -> Int:
    return np.int64(one >> _32)


@inner
def value_of(one: Word) -> Int:
    return np.int64(one & _LOW)


@inner
def place_of(lists: Lists, number: Int, key: Int) -> Int:
    """The index of the first row whose key is `key` or more."""
    return place_in_rows(lists.table, lists.words, number, key)


@inner
def place_in_rows(table: NDArray[np.int64], words: Words, number: Int, key: Int) -> Int:
    """`place_of` for the arrays of lists: to reach them again and again takes most of the time."""
    at = table[number, AT]
    low, high = at, at + table[number, SIZE]
    wanted = row(key, 0)
    while low < high:
        middle = (low + high) // 2
        if words[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low - at


@inner
def value_at(lists: Lists, number: Int, key: Int) -> Int:
    """The value of a key; -1 when it is not there."""
    index = place_of(lists, number, key)
    if index < lists.table[number, SIZE]:
        found = word(lists, number, index)
        if key_of(found) == key:
            return value_of(found)
    return -1


@inner
def set_value(lists: Lists, number: Int, key: Int, value: Int) -> None:
    index = place_of(lists, number, key)
    if index < lists.table[number, SIZE] and key_of(word(lists, number, index)) == key:
        set_word(lists, number, index, row(key, value))
    else:
        insert(lists, number, index, row(key, value))


@inner
def delete_key(lists: Lists, number: Int, key: Int) -> bool:
    """Delete the row of a key; returns whether there was one."""
    index = place_of(lists, number, key)
    if index < lists.table[number, SIZE] and key_of(word(lists, number, index)) == key:
        delete(lists, number, index)
        return True
    return False
