"""A message speaks for the rank that its subject names, with an epoch that can be true."""

from __future__ import annotations

import pytest
from tests.kvrouter.event_bus import event_subject, stored

from dynbus.bus.transport import StoredMessage
from dynbus.kvrouter.events import encode_events
from dynbus.kvrouter.radix.index import RadixIndex, Rank
from dynbus.kvrouter.stream.event_stream import (
    MessageHeader,
    forget_future,
    latest_epoch,
    rank_of,
    read_header,
    subject_rank,
    why_refused,
)

STORED = 1_700_000_000.0


def message(
    *, event_epoch: int = 1, first_id: int = 0, dp_rank: int = 3, subject: str = ""
) -> StoredMessage:
    data = encode_events([stored(1)], event_epoch=event_epoch, first_id=first_id, dp_rank=dp_rank)
    return StoredMessage(subject or event_subject("a", 3), 1, STORED, {}, data)


def test_a_message_has_the_rank_of_its_subject_and_a_header() -> None:
    one = message(event_epoch=7, first_id=9)

    assert rank_of(one) == Rank("a", 3)
    assert read_header(one.data) == MessageHeader(3, 7, 9)


@pytest.mark.parametrize(
    "subject",
    ["demo.Engine._kv.a", "demo.Engine._kv.a.03", "demo.Engine._kv.a.x", "demo.Engine._kv.a.²"],
)
def test_a_subject_that_names_no_rank_is_told(subject: str) -> None:
    assert subject_rank(subject) is None
    assert rank_of(message(subject=subject)) is None


def test_the_latest_epoch_counts_and_the_one_above_it_does_not() -> None:
    latest = latest_epoch(STORED)

    assert why_refused(message(event_epoch=latest), Rank("a", 3)) == ""
    assert "set the clock of its machine" in why_refused(
        message(event_epoch=latest + 1), Rank("a", 3)
    )
    assert rank_of(message(event_epoch=latest + 1)) is None


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (message(dp_rank=4), "a message of rank 4"),
        (message()._replace(data=b"\x01" * 39), "a message that is shorter than a header"),
        (
            message(event_epoch=latest_epoch(STORED) + 3 * 10**9),
            "an epoch 3 s further ahead of the server's clock than is allowed: set the clock of "
            "its machine",
        ),
    ],
)
def test_what_does_not_count_says_why(one: StoredMessage, why: str) -> None:
    assert why_refused(one, Rank("a", 3)) == why
    assert rank_of(one) is None


@pytest.mark.parametrize(
    ("known", "said", "is_forgotten"),
    [
        (latest_epoch(STORED) + 1, 1, True),
        (latest_epoch(STORED) + 1, latest_epoch(STORED), True),
        (latest_epoch(STORED) + 1, latest_epoch(STORED) + 1, False),
        (latest_epoch(STORED), 1, False),
    ],
)
def test_an_epoch_that_nothing_can_follow_any_longer_gives_way(
    known: int, said: int, is_forgotten: bool
) -> None:
    index = RadixIndex()
    index.apply("a", message(event_epoch=known).data)

    forget_future(index, Rank("a", 3), message(event_epoch=said))

    assert (Rank("a", 3) not in index.ranks) is is_forgotten
