"""Every event is in the stream once and in order, or a new epoch says everything again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kvrouter.event_bus import stored

from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Operation,
    decode_events,
)
from dynbus.kvrouter.radix.index import RadixIndex, Rank
from dynbus.kvrouter.stream.awareness import EXACT, AwarenessLevel, CacheAwareness
from dynbus.kvrouter.stream.digest import index_digest
from dynbus.kvrouter.stream.event_log import DIGEST_AFTER, DIGEST_INTERVAL, EventLog, OutgoingBatch
from dynbus.kvrouter.stream.event_stream import CLOCK_ALLOWANCE, EpochClock

NOW = 100.0


def make_log(**settings: int) -> EventLog:
    return EventLog(0, EpochClock(lambda: 1000), **settings)


def send_all(log: EventLog, now: float = NOW) -> list[OutgoingBatch]:
    """Every batch that may be sent now."""
    batches: list[OutgoingBatch] = []
    while (batch := log.next_batch(now)) is not None:
        batches.append(batch)
    return batches


def begun() -> EventLog:
    """A log whose first epoch, of nothing, is stored at sequence 1."""
    log = make_log()
    [first] = send_all(log)
    log.stored(first, 1)
    return log


def test_the_first_epoch_begins_with_what_is_held_and_its_digest() -> None:
    log = make_log()
    log.append([stored(1, 2)], NOW)

    [batch] = send_all(log)

    assert (batch.event_epoch, batch.first_id) == (1000, 0)
    assert decode_events(batch.data).engine_hashes[:2] == [1, 2]
    assert decode_events(batch.data).closing_digest == log.mirror.digest()


def test_events_are_numbered_from_batch_to_batch() -> None:
    log = begun()

    log.append([stored(1), stored(2)], NOW)
    [first] = send_all(log)
    log.append([stored(3)], NOW)
    [second] = send_all(log)

    assert (first.first_id, first.events, second.first_id) == (1, 2, 3)


def test_a_batch_is_bounded_and_events_that_are_larger_are_cut() -> None:
    log = make_log(max_batch_bytes=2048)
    log.append([stored(*range(1, 501)), BlockRemoved(list(range(300, 501)))], NOW)

    batches = send_all(log)
    log.append([stored(*range(1000, 1500), parent=299)], NOW)
    batches += send_all(log)

    index = RadixIndex()
    for batch in batches:
        assert len(batch.data) <= 2048
        index.apply("a", batch.data)
    assert index_digest(index, Rank("a", 0)) == log.mirror.digest()
    assert index.lookup([*range(1, 300), *range(1000, 1500)]) == {"a": 799}


def test_only_so_many_batches_are_in_flight() -> None:
    log = make_log(max_in_flight=2)
    for number in range(1, 5):
        log.append([stored(number)], NOW)
        log.next_batch(NOW)

    assert log.in_flight == 2
    assert log.next_batch(NOW) is None


def test_a_failed_batch_is_repeated_with_its_id_before_anything_new() -> None:
    log = begun()
    log.append([stored(1)], NOW)
    [first] = send_all(log)
    log.append([stored(2)], NOW)
    [second] = send_all(log)

    log.failed(first)
    log.append([stored(3)], NOW)
    waiting_for_second = log.next_batch(NOW)
    log.failed(second)
    again = log.next_batch(NOW)

    assert waiting_for_second is None
    assert again is first
    log.stored(first, 2)
    assert log.next_batch(NOW) is second
    log.stored(second, 3)
    assert log.statistics.repeats == 2
    assert log.statistics.epochs == 1


def test_a_batch_that_was_stored_after_a_later_one_begins_a_new_epoch() -> None:
    log = begun()
    log.append([stored(1)], NOW)
    [first] = send_all(log)
    log.append([stored(2)], NOW)
    [second] = send_all(log)

    log.failed(first)
    log.stored(second, 2)
    assert log.next_batch(NOW) is first
    log.stored(first, 3)
    [batch] = send_all(log)

    assert (batch.event_epoch, batch.first_id) == (1001, 0)
    assert decode_events(batch.data).engine_hashes[:2] == [1, 2]
    assert log.statistics.disorders == 1


def test_a_stream_whose_sequence_went_back_is_told_everything() -> None:
    log = begun()
    log.append([stored(1)], NOW)
    [batch] = send_all(log)

    log.stored(batch, 1)

    assert [again.first_id for again in send_all(log)] == [0]


def test_when_too_much_waits_it_gives_way_to_what_is_held_then() -> None:
    log = make_log(max_waiting_bytes=200)
    send_all(log)
    for number in range(1, 30):
        log.append([stored(number)], NOW)
        log.append([BlockRemoved([number])], NOW)
    log.append([stored(99)], NOW)

    assert log.waiting_bytes <= 200
    [batch] = send_all(log)
    assert log.statistics.overflows >= 1
    assert batch.event_epoch == 1001
    assert decode_events(batch.data).engine_hashes[0] == 99


def test_the_outcome_of_a_batch_of_an_epoch_that_is_over_changes_nothing() -> None:
    log = begun()
    log.append([stored(1)], NOW)
    [old] = send_all(log)
    log.begin_anew()
    [new] = send_all(log)

    log.failed(old)
    log.stored(old, 7)

    assert not log.is_current(old)
    log.stored(new, 2)
    assert log.is_idle


def test_requests_of_a_moment_cost_one_epoch_and_the_next_waits() -> None:
    log = begun()
    for _ in range(5):
        log.ask_resync(log.event_epoch, NOW + 1)
    [batch] = send_all(log, NOW + 1)
    log.stored(batch, 2)

    log.ask_resync(1000, NOW + 1.1)  # of the epoch before: its answer is on the way
    log.ask_resync(log.event_epoch, NOW + 1.1)

    assert log.statistics.coalesced == 5
    assert send_all(log, NOW + 1.2) == []
    assert len(send_all(log, NOW + 1.6)) == 1
    assert log.statistics.resyncs == 2


@pytest.mark.parametrize("forged", [1001 + CLOCK_ALLOWANCE, (1 << 63) - 1, (1 << 64) - 1])
def test_a_forged_epoch_does_not_use_up_the_numbers(forged: int) -> None:
    log = begun()

    log.ask_resync(forged, NOW + 1)
    [batch] = send_all(log, NOW + 1)

    assert batch.event_epoch == 1001


def test_a_digest_follows_events_soon_and_comes_now_and_then_without_any() -> None:
    log = begun()
    log.append_digest(NOW, NOW + 9.0)
    idle = log.next_batch(NOW + 9.0)
    log.append([stored(1)], NOW)
    log.append_digest(NOW, NOW + 9.0)

    [batch] = send_all(log, NOW + 9.0)

    assert idle is None
    assert decode_events(batch.data).closing_digest == log.mirror.digest()
    assert log.digest_at == NOW + 19.0


def test_a_digest_ends_its_message() -> None:
    log = begun()
    log.append([stored(1)], NOW)
    log.append_digest(NOW, NOW + 5.0)
    log.append([stored(2)], NOW)

    first, second = send_all(log, NOW + 5.0)

    assert decode_events(first.data).operations == [Operation.STORED, Operation.DIGEST]
    assert decode_events(second.data).operations == [Operation.STORED]


def test_smaller_messages_begin_a_new_epoch() -> None:
    log = begun()
    log.append([BlockStored(None, list(range(1, 300)), list(range(1, 300)))], NOW)

    log.limit_batches(1024)
    batches = send_all(log)

    assert all(len(batch.data) <= 1024 for batch in batches)
    assert batches[0].event_epoch == 1001


@given(st.data())
def test_whatever_becomes_of_batches_the_stream_leads_to_what_is_held(data: st.DataObject) -> None:
    log = make_log(max_batch_bytes=256, max_waiting_bytes=600, max_in_flight=3)
    index = RadixIndex()
    flying: list[OutgoingBatch] = []
    ids: dict[tuple[int, int], int] = {}
    sequence = 0
    number = 0
    now = NOW

    def arrive(batch: OutgoingBatch) -> int:
        nonlocal sequence
        key = (batch.event_epoch, batch.first_id)
        if key not in ids:
            sequence += 1
            ids[key] = sequence
            index.apply("a", batch.data)
        return ids[key]

    def settle(batch: OutgoingBatch, outcome: str) -> None:
        flying.remove(batch)
        if outcome == "stored":
            log.stored(batch, arrive(batch))
            return
        if outcome == "unknown":
            arrive(batch)
        log.failed(batch)

    for _ in range(data.draw(st.integers(1, 25))):
        now += 0.3
        step = data.draw(st.sampled_from(["events", "send", "settle", "resync"]))
        if step == "events":
            number += 3
            log.append([stored(number), stored(number + 1, parent=number)], now)
            if data.draw(st.booleans()):
                log.append([BlockRemoved([data.draw(st.integers(1, number + 1))])], now)
        elif step == "send":
            flying += send_all(log, now)
        elif step == "settle" and flying:
            batch = data.draw(st.sampled_from(flying))
            settle(batch, data.draw(st.sampled_from(["stored", "stored", "lost", "unknown"])))
        elif step == "resync":
            log.ask_resync(log.event_epoch, now)

    while flying or not log.is_idle:
        now += 1.0
        for batch in list(flying):
            settle(batch, "stored")
        flying += send_all(log, now)

    assert index_digest(index, Rank("a", 0)) == log.mirror.digest()


DEGRADED = CacheAwareness(AwarenessLevel.DEGRADED, "messages lost")


def test_how_far_events_can_be_relied_on_is_in_each_batch_and_soon_in_one() -> None:
    log = begun()

    log.set_awareness(DEGRADED)
    due = log.digest_at
    log.append_digest(due, due)
    [digest] = send_all(log)
    log.append([stored(1)], NOW)
    [events] = send_all(log)

    assert due == NOW + DIGEST_AFTER
    assert [one.awareness for one in (digest, events)] == ["degraded (messages lost)"] * 2


def test_what_is_said_again_needs_no_message() -> None:
    log = begun()

    log.set_awareness(EXACT)

    assert log.digest_at == NOW + DIGEST_INTERVAL


def test_a_rank_whose_events_were_dropped_is_degraded_until_its_engine_clears_its_cache() -> None:
    log = begun()

    log.forget(loss="dropped")
    log.append([stored(1)], NOW)
    after_loss = log.awareness
    log.append([AllBlocksCleared()], NOW)

    assert str(after_loss) == "degraded (dropped)"
    assert log.awareness == EXACT
