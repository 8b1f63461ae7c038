"""Whether anybody reads a stream, and when it is paused: without a clock."""

from __future__ import annotations

from dynbus.llm.resumable.readers import SEEN_SECONDS, UNREAD_BYTES, UNREAD_SECONDS, Readers

LATER = UNREAD_SECONDS + 0.1


def test_a_stream_that_was_left_is_paused_after_a_while_or_when_much_was_stored() -> None:
    readers = Readers(0.0, 100)
    readers.left(50.0, 1000)

    assert readers.are_gone(50.0)
    assert not readers.have_it_paused(50.0 + UNREAD_SECONDS, 1000 + UNREAD_BYTES)
    assert readers.have_it_paused(50.0 + LATER, 1000)
    assert readers.have_it_paused(50.0, 1001 + UNREAD_BYTES)


def test_whoever_asks_for_a_stream_elsewhere_reads_it_for_a_while() -> None:
    readers = Readers(0.0, 0)
    readers.seen(8.0, 5000)

    assert not readers.are_gone(8.0 + SEEN_SECONDS - 0.1)
    assert not readers.have_it_paused(8.0, 2 * UNREAD_BYTES)
    assert not readers.have_it_paused(8.0 + SEEN_SECONDS + UNREAD_SECONDS, 5000 + UNREAD_BYTES)
    assert readers.have_it_paused(8.0 + SEEN_SECONDS + LATER, 5000)


def test_a_reader_that_leaves_here_does_not_end_what_is_read_elsewhere() -> None:
    readers = Readers(0.0, 0)
    readers.seen(8.0, 0)
    readers.left(9.0, 0)

    assert not readers.are_gone(8.0 + SEEN_SECONDS - 0.1)


def test_a_stream_whose_engine_others_need_is_paused_at_once() -> None:
    readers = Readers(0.0, 0)
    readers.seen(8.0, 0)
    readers.ask_to_pause()

    assert readers.have_it_paused(8.0, 0)
