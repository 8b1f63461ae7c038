"""Events and their numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.errors import DynbusError
from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.resumable.events import EventNumbers, NumberedSink, number_of, numbered_ids

EVENTS = [b"data: a\n\n", b"event: b\ndata: 2\n\n", b"data: [DONE]\n\n"]


def test_events_have_their_ids_whatever_chunks_they_come_in() -> None:
    numbers = EventNumbers("one")

    told = numbers.number(EVENTS[0] + EVENTS[1]) + numbers.number(EVENTS[2])

    assert told == (
        b"id: one.1\ndata: a\n\nid: one.2\nevent: b\ndata: 2\n\nid: one.3\ndata: [DONE]\n\n"
    )


@given(st.lists(st.sampled_from(EVENTS)), st.integers(0, 12), st.integers(1, 4))
def test_what_was_read_and_what_follows_are_the_whole(
    events: list[bytes], after: int, size: int
) -> None:
    whole = EventNumbers("one").number(b"".join(events))
    chunks = [b"".join(events[at : at + size]) for at in range(0, len(events), size)]

    numbers = EventNumbers("one", after)
    rest = b"".join(map(numbers.number, chunks))

    before = b"".join(event + b"\n\n" for event in whole.split(b"\n\n")[:-1][:after])
    assert before + rest == whole
    assert numbers.count == len(events)


def test_events_after_the_last_that_can_be_gone_on_from_have_no_id() -> None:
    numbers = EventNumbers("one")
    numbers.number(EVENTS[0])

    numbers.stop()

    assert numbers.number(EVENTS[1]) == EVENTS[1]


class FullReader:
    """A sink that takes no more at once."""

    def write(self, chunks: Sequence[bytes]) -> bool:
        return False

    def end(self, error: DynbusError | None) -> None:
        pass


def test_a_stream_waits_for_its_reader_only_when_nobody_else_can_read_it() -> None:
    numbers = EventNumbers("one")
    sink = NumberedSink(numbers, FullReader())

    resumable = sink.write(EVENTS)
    numbers.stop()
    here_alone = sink.write(EVENTS)

    assert (resumable, here_alone) == (True, False)


def test_the_id_of_an_event_says_how_many_were_read() -> None:
    assert number_of("", "a.b") == 0
    assert number_of("a.b.12", "a.b") == 12


@pytest.mark.parametrize("given_id", ["two.1", "one", "one.", "one.x", "one.-1", "one.1 ", "1"])
def test_what_is_no_id_of_the_stream_is_refused(given_id: str) -> None:
    with pytest.raises(BadRequest, match="Last-Event-ID"):
        number_of(given_id, "one")


def test_ids_of_a_seed_are_the_same_each_time_and_differ() -> None:
    first, again, other = numbered_ids("a"), numbered_ids("a"), numbered_ids("b")

    made = [first() for _ in range(3)]

    assert made == [again() for _ in range(3)]
    assert len({*made, other()}) == 4
    assert all(len(one) == 32 for one in made)
