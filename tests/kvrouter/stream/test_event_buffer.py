"""What waits for the loop is bounded, rank by rank, and nothing of it is lost in silence."""

from __future__ import annotations

import threading

from tests.kvrouter.event_bus import stored

from dynbus.kvrouter.events import KvEvent
from dynbus.kvrouter.stream.awareness import EXACT, AwarenessLevel, CacheAwareness
from dynbus.kvrouter.stream.event_buffer import OBJECT_BYTES, EventBuffer, Handed

ALL = 1 << 20


def one(number: int) -> list[KvEvent]:
    return [stored(number)]


def test_calls_of_a_rank_come_out_together_and_in_their_order() -> None:
    buffer = EventBuffer()
    for number in range(3):
        buffer.put(0, one(number), float(number))

    assert buffer.pop(ALL) == Handed(0, False, 0.0, [*one(0), *one(1), *one(2)])
    assert buffer.pop(ALL) is None
    assert buffer.is_empty


def test_ranks_take_turns_when_there_is_more_than_is_asked_for() -> None:
    buffer = EventBuffer()
    for number in range(3):
        buffer.put(0, one(number), 0.0)
    buffer.put(1, one(9), 0.0)

    taken = [buffer.pop(2) for _ in range(3)]

    assert [(each.dp_rank, len(each.events)) for each in taken if each] == [(0, 2), (1, 1), (0, 1)]
    assert buffer.events == 0


def test_a_reset_voids_what_the_rank_said_before_it_and_nothing_else() -> None:
    buffer = EventBuffer()
    buffer.put(0, one(1), 0.0)
    buffer.put(1, one(2), 0.0)
    buffer.reset(0)
    buffer.put(0, one(3), 5.0)

    assert buffer.pop(ALL) == Handed(0, True, 5.0, one(3))
    assert buffer.pop(ALL) == Handed(1, False, 0.0, one(2))
    assert buffer.dropped == 0


def test_a_rank_that_says_too_much_begins_anew_and_what_was_dropped_is_counted() -> None:
    buffer = EventBuffer(max_bytes=10 * OBJECT_BYTES)
    buffer.put(1, one(7), 0.0)

    fitted = [buffer.put(0, one(number), 0.0) for number in range(12)]

    assert fitted.count(False) == 1
    lost = fitted.index(False)
    assert buffer.dropped == lost
    other, begun = buffer.pop(ALL), buffer.pop(ALL)
    assert other == Handed(1, False, 0.0, one(7))
    kept = [event for n in range(lost, 12) for event in one(n)]
    assert begun == Handed(0, True, 0.0, kept, is_lossy=True)


def test_memory_stays_within_the_limit_however_much_is_handed_over() -> None:
    buffer = EventBuffer(max_bytes=100 * OBJECT_BYTES)

    for number in range(10_000):
        buffer.put(0, one(number), 0.0)

    assert buffer.events <= 100
    assert buffer.events + buffer.dropped == 10_000


def test_calls_without_events_take_no_room() -> None:
    buffer = EventBuffer(max_bytes=1)

    assert buffer.put(0, [], 0.0)
    assert buffer.is_empty


def test_one_call_is_taken_whatever_its_size() -> None:
    buffer = EventBuffer(max_bytes=1)

    assert buffer.put(0, one(1) * 50, 0.0)
    assert buffer.events == 50


def test_threads_lose_nothing_to_each_other() -> None:
    buffer = EventBuffer()
    taken = 0

    def hand_over(dp_rank: int) -> None:
        for number in range(2000):
            buffer.put(dp_rank, one(number), 0.0)

    threads = [threading.Thread(target=hand_over, args=(n % 2,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or not buffer.is_empty:
        if handed := buffer.pop(100):
            taken += len(handed.events)
    for thread in threads:
        thread.join()

    assert (taken, buffer.events, buffer.dropped) == (8000, 0, 0)


DEGRADED = CacheAwareness(AwarenessLevel.DEGRADED, "lost")


def test_how_far_events_can_be_relied_on_comes_out_behind_them() -> None:
    buffer = EventBuffer()
    for number in range(3):
        buffer.put(0, one(number), 0.0)
    buffer.set_awareness(0, DEGRADED)
    buffer.set_awareness(0, EXACT)

    taken = [buffer.pop(2), buffer.pop(2)]

    assert [each.awareness for each in taken if each] == [None, EXACT]


def test_how_far_events_can_be_relied_on_is_told_without_any() -> None:
    buffer = EventBuffer()

    buffer.set_awareness(3, DEGRADED)

    assert buffer.pop(ALL) == Handed(3, False, 0.0, [], awareness=DEGRADED)
    assert buffer.is_empty


def test_a_reset_makes_good_what_was_dropped() -> None:
    buffer = EventBuffer(max_bytes=OBJECT_BYTES)
    for number in range(3):
        buffer.put(0, one(number), 0.0)

    buffer.reset(0)

    assert buffer.pop(ALL) == Handed(0, True, 0.0, [])
