"""A message speaks for the rank that its subject names, with an epoch that can be true."""

from __future__ import annotations

import pytest
from tests.kvrouter.event_bus import event_subject, stored

from dynbus.bus.transport import StoredMessage
from dynbus.kvrouter.events import encode_events
from dynbus.kvrouter.names import AWARENESS, PUBLISHED
from dynbus.kvrouter.radix.index import MessageOutcome, RadixIndex, Rank
from dynbus.kvrouter.stream.event_stream import (
    UNREADABLE,
    RefusedEvents,
    StoredEvents,
    apply_events,
    latest_epoch,
    read_events,
)

STORED = 1_700_000_000.0


def message(
    *, event_epoch: int = 1, first_id: int = 0, dp_rank: int = 3, subject: str = ""
) -> StoredMessage:
    data = encode_events([stored(1)], event_epoch=event_epoch, first_id=first_id, dp_rank=dp_rank)
    return StoredMessage(subject or event_subject("a", 3), 1, STORED, {}, data)


A3 = Rank("a", 3)


def counting(one: StoredMessage) -> StoredEvents:
    events = read_events(one)
    assert isinstance(events, StoredEvents)
    return events


def test_a_message_is_read_once_with_its_rank_and_what_is_said_of_it() -> None:
    fields = {AWARENESS: "degraded (lost)", PUBLISHED: "1.5"}

    events = counting(message(event_epoch=7, first_id=9)._replace(headers=fields))

    assert events.rank == A3
    assert (events.batch.event_epoch, events.batch.first_id, len(events.batch)) == (7, 9, 1)
    assert (events.time, events.stated, events.published) == (STORED, "degraded (lost)", "1.5")


@pytest.mark.parametrize(
    "subject",
    ["demo.Engine._kv.a", "demo.Engine._kv.a.03", "demo.Engine._kv.a.x", "demo.Engine._kv.a.²"],
)
def test_a_subject_that_names_no_rank_is_told(subject: str) -> None:
    assert read_events(message(subject=subject)) is None


def test_the_latest_epoch_counts_and_the_one_above_it_does_not() -> None:
    latest = latest_epoch(STORED)

    assert counting(message(event_epoch=latest)).batch.event_epoch == latest
    refused = read_events(message(event_epoch=latest + 1))
    assert isinstance(refused, RefusedEvents)
    assert "set the clock of its machine" in refused.why


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (message(dp_rank=4), "a message of rank 4"),
        (message()._replace(data=b"\x01" * 39), "a message that is shorter than a header"),
        (message()._replace(data=message().data[:-1]), UNREADABLE),
        (
            message(event_epoch=latest_epoch(STORED) + 3 * 10**9),
            "an epoch 3 s further ahead of the server's clock than is allowed: set the clock of "
            "its machine",
        ),
    ],
)
def test_what_does_not_count_says_why(one: StoredMessage, why: str) -> None:
    assert read_events(one) == RefusedEvents(A3, why)


@pytest.mark.parametrize(
    ("known", "said", "gives_way"),
    [
        (latest_epoch(STORED) + 1, 1, True),
        (latest_epoch(STORED) + 1, latest_epoch(STORED), True),
        (latest_epoch(STORED), 1, False),
    ],
)
def test_an_epoch_that_nothing_can_follow_any_longer_gives_way(
    known: int, said: int, gives_way: bool
) -> None:
    index = RadixIndex()
    index.apply("a", message(event_epoch=known).data)

    applied = apply_events(index, counting(message(event_epoch=said)))

    assert applied.verdict is (MessageOutcome.APPLIED if gives_way else MessageOutcome.STALE)
    assert index.ranks[A3].event_epoch == (said if gives_way else known)


def test_what_a_rank_says_of_its_events_is_kept_until_it_says_something_else() -> None:
    index = RadixIndex()
    degraded = message()._replace(headers={AWARENESS: "degraded (lost)"})

    apply_events(index, counting(degraded))
    first = index.ranks[A3].stated
    apply_events(index, counting(message()))
    of_a_duplicate = index.ranks[A3].stated
    apply_events(index, counting(message(first_id=1)))

    assert (first, of_a_duplicate, index.ranks[A3].stated) == (
        "degraded (lost)",
        "degraded (lost)",
        "",
    )
