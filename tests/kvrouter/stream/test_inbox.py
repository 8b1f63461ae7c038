"""What waits for the loop is bounded, rank by rank, and nothing of it is lost in silence."""

from __future__ import annotations

import threading

from tests.kvrouter.event_bus import stored

from dynbus.kvrouter.events import KvEvent
from dynbus.kvrouter.stream.awareness import EXACT, AwarenessLevel, CacheAwareness
from dynbus.kvrouter.stream.inbox import OBJECT_BYTES, Handed, Inbox

ALL = 1 << 20


def one(number: int) -> list[KvEvent]:
    return [stored(number)]


def test_calls_of_a_rank_come_out_together_and_in_their_order() -> None:
    inbox = Inbox()
    for number in range(3):
        inbox.put(0, one(number), float(number))

    assert inbox.take(ALL) == Handed(0, False, 0.0, [*one(0), *one(1), *one(2)])
    assert inbox.take(ALL) is None
    assert inbox.is_empty


def test_ranks_take_turns_when_there_is_more_than_is_asked_for() -> None:
    inbox = Inbox()
    for number in range(3):
        inbox.put(0, one(number), 0.0)
    inbox.put(1, one(9), 0.0)

    taken = [inbox.take(2) for _ in range(3)]

    assert [(each.dp_rank, len(each.events)) for each in taken if each] == [(0, 2), (1, 1), (0, 1)]
    assert inbox.events == 0


def test_a_reset_voids_what_the_rank_said_before_it_and_nothing_else() -> None:
    inbox = Inbox()
    inbox.put(0, one(1), 0.0)
    inbox.put(1, one(2), 0.0)
    inbox.reset(0)
    inbox.put(0, one(3), 5.0)

    assert inbox.take(ALL) == Handed(0, True, 5.0, one(3))
    assert inbox.take(ALL) == Handed(1, False, 0.0, one(2))
    assert inbox.dropped == 0


def test_a_rank_that_says_too_much_begins_anew_and_what_was_dropped_is_counted() -> None:
    inbox = Inbox(max_bytes=10 * OBJECT_BYTES)
    inbox.put(1, one(7), 0.0)

    fitted = [inbox.put(0, one(number), 0.0) for number in range(12)]

    assert fitted.count(False) == 1
    lost = fitted.index(False)
    assert inbox.dropped == lost
    other, begun = inbox.take(ALL), inbox.take(ALL)
    assert other == Handed(1, False, 0.0, one(7))
    kept = [event for n in range(lost, 12) for event in one(n)]
    assert begun == Handed(0, True, 0.0, kept, is_lossy=True)


def test_memory_stays_within_the_limit_however_much_is_handed_over() -> None:
    inbox = Inbox(max_bytes=100 * OBJECT_BYTES)

    for number in range(10_000):
        inbox.put(0, one(number), 0.0)

    assert inbox.events <= 100
    assert inbox.events + inbox.dropped == 10_000


def test_calls_without_events_take_no_room() -> None:
    inbox = Inbox(max_bytes=1)

    assert inbox.put(0, [], 0.0)
    assert inbox.is_empty


def test_one_call_is_taken_whatever_its_size() -> None:
    inbox = Inbox(max_bytes=1)

    assert inbox.put(0, one(1) * 50, 0.0)
    assert inbox.events == 50


def test_threads_lose_nothing_to_each_other() -> None:
    inbox = Inbox()
    taken = 0

    def hand_over(dp_rank: int) -> None:
        for number in range(2000):
            inbox.put(dp_rank, one(number), 0.0)

    threads = [threading.Thread(target=hand_over, args=(n % 2,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or not inbox.is_empty:
        if handed := inbox.take(100):
            taken += len(handed.events)
    for thread in threads:
        thread.join()

    assert (taken, inbox.events, inbox.dropped) == (8000, 0, 0)


DEGRADED = CacheAwareness(AwarenessLevel.DEGRADED, "lost")


def test_how_far_events_can_be_relied_on_comes_out_behind_them() -> None:
    inbox = Inbox()
    for number in range(3):
        inbox.put(0, one(number), 0.0)
    inbox.set_awareness(0, DEGRADED)
    inbox.set_awareness(0, EXACT)

    taken = [inbox.take(2), inbox.take(2)]

    assert [each.awareness for each in taken if each] == [None, EXACT]


def test_how_far_events_can_be_relied_on_is_told_without_any() -> None:
    inbox = Inbox()

    inbox.set_awareness(3, DEGRADED)

    assert inbox.take(ALL) == Handed(3, False, 0.0, [], awareness=DEGRADED)
    assert inbox.is_empty


def test_a_reset_makes_good_what_was_dropped() -> None:
    inbox = Inbox(max_bytes=OBJECT_BYTES)
    for number in range(3):
        inbox.put(0, one(number), 0.0)

    inbox.reset(0)

    assert inbox.take(ALL) == Handed(0, True, 0.0, [])
