"""A reader hands out items in order and once, and says what it lacks."""

from __future__ import annotations

import pytest

from dynbus.bus.errors import PayloadTooLarge
from dynbus.bus.protocol.stream_reader import StreamReader
from dynbus.bus.protocol.wire import End, Item, Items, Part, failed_frame

SECRET = bytes(16)
WINDOW = 100
MAX_ITEM = 240
MAX_UNIT = 60


def make_reader() -> StreamReader:
    return StreamReader(window=WINDOW, max_item_bytes=MAX_ITEM)


def lenient_reader() -> StreamReader:
    """One whose item limit no frame of whole items can exceed."""
    return StreamReader(window=WINDOW, max_item_bytes=1 << 20)


def test_a_gap_says_that_the_reader_is_behind_until_it_is_filled() -> None:
    reader = make_reader()

    reader.receive(Items(7, SECRET, 1, 1, [b"b"]))
    behind = reader.behind
    reader.receive(Items(7, SECRET, 1, 0, [b"a", b"b"]))

    assert behind
    assert not reader.behind
    assert reader.drain() == [b"a", b"b"]


def test_a_frame_that_overlaps_brings_only_what_is_new() -> None:
    reader = make_reader()
    reader.receive(Items(7, SECRET, 1, 0, [b"a", b"b"]))

    reader.receive(Items(7, SECRET, 1, 1, [b"b", b"c"]))
    reader.receive(Items(7, SECRET, 1, 0, [b"a"]))

    assert reader.drain() == [b"a", b"b", b"c"]


def test_parts_beyond_the_item_limit_are_refused() -> None:
    reader = make_reader()
    for sequence in range(4):
        reader.receive(Part(7, SECRET, 1, sequence, bytes(MAX_UNIT)))

    with pytest.raises(PayloadTooLarge, match="max_item_bytes = 240"):
        reader.receive(Part(7, SECRET, 1, 4, b"x"))


def test_an_error_ends_the_stream_also_where_items_are_held_already() -> None:
    reader = make_reader()
    reader.receive(Items(7, SECRET, 1, 0, [b"a", b"b"]))
    failed = failed_frame(7, SECRET, 1, 1, PayloadTooLarge("the limit shrank"))

    reader.receive(failed)

    assert reader.drain() == [b"a", b"b"]
    assert reader.terminal == failed


def test_the_end_of_a_stream_grants_no_more() -> None:
    reader = make_reader()

    reader.receive(Items(7, SECRET, 1, 0, [bytes(WINDOW)]))
    reader.receive(End(7, SECRET, 1, 1, None))

    assert reader.consume(WINDOW) is None


def test_frames_that_come_just_in_time_take_the_short_way() -> None:
    reader = lenient_reader()

    taken = [
        reader.receive_next(Item(7, SECRET, 1, 0, b"a")),
        reader.receive_next(Items(7, SECRET, 1, 1, [b"b", b"c"])),
    ]

    assert taken == [True, True]
    assert reader.drain() == [b"a", b"b", b"c"]
    assert reader.next_sequence == 3


def test_the_short_way_is_closed_to_gaps_repeats_parts_and_after_the_end() -> None:
    reader = lenient_reader()
    reader.receive(Items(7, SECRET, 1, 0, [b"a"]))
    repeat = reader.receive_next(Item(7, SECRET, 1, 0, b"a"))
    gap = reader.receive_next(Item(7, SECRET, 1, 2, b"c"))
    reader.receive(Part(7, SECRET, 1, 1, b"b1"))
    after_part = reader.receive_next(Item(7, SECRET, 1, 2, b"b2"))
    reader.receive(Item(7, SECRET, 1, 2, b"b2"))
    reader.receive(End(7, SECRET, 1, 3, None))
    after_end = reader.receive_next(Item(7, SECRET, 1, 4, b"d"))

    assert (repeat, gap, after_part, after_end) == (False, False, False, False)
    assert reader.drain() == [b"a", b"b1b2"]


def test_repr_is_a_status_line() -> None:
    reader = make_reader()
    new = repr(reader)
    reader.receive(Items(7, SECRET, 1, 1, [b"b"]))
    behind = repr(reader)
    reader.receive(Items(7, SECRET, 1, 0, [b"a"]))
    reader.receive(End(7, SECRET, 1, 1, None))

    assert new == "<StreamReader [open | next: 0, ready: 0]>"
    assert behind == "<StreamReader [behind | next: 0, ready: 0]>"
    assert repr(reader) == "<StreamReader [ended | next: 2, ready: 1]>"
