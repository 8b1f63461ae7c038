"""A method that cannot keep up has a bounded backlog, and learns what it missed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynbus.actors.serving.event_backlog import EventBacklog
from dynbus.bus.topics import Event


def event(number: int, size: int = 1) -> Event:
    return Event(str(number), "=", number, 0.0, {}, bytes(size))


def test_further_events_are_dropped_by_number_and_by_bytes() -> None:
    by_number, by_bytes = EventBacklog(2, 100), EventBacklog(100, 10)

    assert [by_number.add(event(number)) for number in range(3)] == [True, True, False]
    assert [by_bytes.add(event(number, 5)) for number in range(3)] == [True, True, False]
    assert by_bytes.add(event(3, 0)), "a smaller one has room"


def test_an_event_larger_than_the_bound_waits_alone() -> None:
    backlog = EventBacklog(100, 10)

    assert backlog.add(event(1, 11))
    assert not backlog.add(event(2))
    assert backlog.take().sequence == 1


@given(st.lists(st.one_of(st.none(), st.integers(0, 9))))
def test_each_event_is_taken_in_order_or_told_as_missed(steps: list[int | None]) -> None:
    backlog = EventBacklog(3, 12)
    kept: list[int] = []
    taken: list[int] = []
    missed = 0

    for number, size in enumerate(steps):
        if size is not None:
            if backlog.add(event(number, size)):
                kept.append(number)
        elif len(backlog):
            taken.append(backlog.take().sequence)
        missed += backlog.caught_up()
        assert len(backlog) <= 3
    while len(backlog):
        taken.append(backlog.take().sequence)
    missed += backlog.caught_up()

    assert taken == kept
    assert len(kept) + missed == sum(size is not None for size in steps)
