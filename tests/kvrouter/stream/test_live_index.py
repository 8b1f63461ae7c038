"""An index finds out by what it reads which ranks it lacks blocks of, and who is gone."""

from __future__ import annotations

import pytest
from tests.kvrouter.event_bus import event_subject, stored

from dynbus.bus.transport import StoredMessage
from dynbus.kvrouter.events import CacheDigest, KvEvent, encode_events
from dynbus.kvrouter.radix.index import RadixIndex, Rank
from dynbus.kvrouter.stream.digest import index_digest
from dynbus.kvrouter.stream.event_stream import UNREADABLE, latest_epoch
from dynbus.kvrouter.stream.live_index import LiveIndex
from dynbus.kvrouter.stream.membership import LEASE_DELAY, UNKNOWN_GRACE
from dynbus.kvrouter.stream.resync import ResyncPlan, ResyncRequest

A = Rank("a", 0)
STORED = 1_700_000_000.0


class Story:
    """A live index that reads messages one after the other."""

    def __init__(self) -> None:
        self.needs = 0
        plan = ResyncPlan(jitter=lambda: 0.5)
        self.live = LiveIndex("demo.Engine", RadixIndex(), plan, self._count)

    def _count(self) -> None:
        self.needs += 1

    def read(
        self,
        *events: KvEvent | CacheDigest,
        data: bytes = b"",
        event_epoch: int = 1,
        first_id: int = 0,
        now: float = 100.0,
        unix_now: float = STORED,
        is_live: bool = True,
        subject: str = event_subject("a"),
        headers: dict[str, str] | None = None,
        at: float = STORED,
    ) -> None:
        data = data or encode_events(events, event_epoch=event_epoch, first_id=first_id)
        message = StoredMessage(subject, 1, at, headers or {}, data)
        self.live.apply(message, now, unix_now, is_live=is_live)

    def reasons(self) -> list[str]:
        return [self.live.plan.reason(rank) for rank in self.live.unsettled]


def digest_of(*events: KvEvent) -> CacheDigest:
    index = RadixIndex()
    index.apply("a", encode_events(events, event_epoch=1, first_id=0))
    return index_digest(index, A)


def test_a_rank_is_settled_once_its_digest_agrees() -> None:
    story = Story()

    story.read(stored(1, 2))
    before = story.reasons()
    story.read(digest_of(stored(1, 2)), first_id=1)

    assert (before, story.reasons()) == ([""], [])
    assert story.needs == 0


@pytest.mark.parametrize(
    ("first_id", "reason"), [(1, ""), (2, "gap"), (0, "")], ids=["next", "gap", "again"]
)
def test_what_is_missing_is_asked_for(first_id: int, reason: str) -> None:
    story = Story()
    story.read(stored(1))

    story.read(stored(2), first_id=first_id)

    assert story.reasons() == [reason]


def test_an_epoch_that_was_not_seen_to_begin_is_asked_for() -> None:
    story = Story()

    story.read(stored(1), first_id=7, event_epoch=5)

    assert story.reasons() == ["joined late"]
    assert story.live.requests(101.0) == [(A, ResyncRequest(5, "joined late"))]
    assert story.needs == 1


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x02" + bytes(47), UNREADABLE),
        (bytes(3), "a message that is shorter than a header"),
        (encode_events([stored(9)], event_epoch=2, first_id=0, dp_rank=4), "a message of rank 4"),
        (
            encode_events([stored(9)], event_epoch=latest_epoch(STORED + 1.0), first_id=0),
            "an epoch 1 s further ahead of the server's clock than is allowed: set the clock of "
            "its machine",
        ),
    ],
)
def test_what_cannot_be_used_makes_a_rank_that_is_known_doubtful(data: bytes, why: str) -> None:
    story = Story()
    story.read(stored(1), CacheDigest(1, digest_of(stored(1)).digest))

    story.read(data=data)

    assert story.reasons() == [why]
    assert story.live.refused == 1
    assert story.live.index.lookup([1]) == {"a": 1}


def test_what_cannot_be_used_is_logged_once_for_each_instance(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story = Story()

    for instance in ("a", "a", "b"):
        story.read(data=bytes(60), subject=event_subject(instance))

    said = [one.message for one in caplog.records if "are refused" in one.message]
    assert len(said) == 2
    assert said[0].endswith(f"events of a/0 are refused: {UNREADABLE}")


def test_an_answer_that_cannot_be_read_is_no_reason_to_ask_again_soon() -> None:
    story = Story()
    story.read(stored(1))
    story.read(data=b"\x02" + bytes(47))
    asked: list[float] = []
    now = 100.0

    while now < 160.0:
        if story.live.requests(now):
            asked.append(now)
            for _ in range(5):
                story.read(data=b"\x02" + bytes(47), now=now)
        now += 0.1

    assert 4 <= len(asked) <= 9


def test_the_age_of_what_was_in_the_stream_before_counts_against_its_instance() -> None:
    story = Story()
    story.read(stored(1), unix_now=STORED + 3600.0, is_live=False)
    story.read(stored(1), unix_now=STORED + 3600.0, subject=event_subject("b"))

    story.live.look_at_instances([], 100.0, can_hear=True)
    story.live.look_at_instances([], 100.1 + LEASE_DELAY, can_hear=True)
    soon = set(story.live.index.ranks)
    story.live.look_at_instances([], 100.1 + UNKNOWN_GRACE, can_hear=True)

    assert soon == {Rank("b", 0)}
    assert not story.live.index.ranks
    assert not list(story.live.plan.ranks())


def test_staleness_is_of_what_is_live() -> None:
    story = Story()
    published = {"Dynbus-Published": f"{STORED - 2.0}"}

    story.read(stored(1), headers=published, is_live=False)
    before = len(story.live.ages)
    story.read(stored(2), first_id=1, headers=published)
    story.read(stored(3), first_id=2, headers={"Dynbus-Published": "soon"})

    assert before == 0
    assert list(story.live.ages) == pytest.approx([2.0])
    assert story.live.refused == 1


def test_an_index_of_another_stream_asks_every_rank() -> None:
    story = Story()
    story.read(stored(1))
    story.read(stored(1), subject=event_subject("b"))

    story.live.begin_anew(RadixIndex(), 100.0)

    assert story.reasons() == ["the stream was made again"] * 2
    assert not story.live.index.ranks


def test_only_instances_with_a_lease_are_asked() -> None:
    story = Story()
    story.live.look_at_instances(["a"], 99.0, can_hear=True)
    story.read(stored(1), first_id=3)
    story.read(stored(1), first_id=3, subject=event_subject("b"))

    asked = story.live.requests(101.0)

    assert [rank for rank, _ in asked] == [A]
    assert story.live.unsettled == [A]


def test_an_instance_whose_clock_is_days_ahead_is_not_asked_again_soon() -> None:
    story = Story()
    ahead = latest_epoch(STORED) + 1
    story.live.look_at_instances(["a"], 90.0, can_hear=True)
    asked: list[float] = []
    now = 100.0

    while now < 160.0:
        story.live.look_at_instances(["a"], now, can_hear=True)
        if story.live.requests(now):
            asked.append(now)
            story.read(stored(1), event_epoch=ahead, now=now)
        now += 0.1

    assert 4 <= len(asked) <= 9


def test_an_instance_without_events_that_count_is_known_by_why_they_are_refused() -> None:
    story = Story()
    story.live.look_at_instances(["a", "b"], 90.0, can_hear=True)
    before = story.live.refusal

    story.read(stored(1), event_epoch=latest_epoch(STORED + 1.0))
    refused = story.live.refusal
    story.read(stored(1))

    assert (before, story.live.refusal) == ("", "")
    assert refused == (
        "those of a are refused, an epoch 1 s further ahead of the server's clock than is "
        "allowed: set the clock of its machine"
    )


def test_what_was_said_before_the_server_clock_was_set_back_by_days_gives_way() -> None:
    story = Story()
    days = 2 * 24 * 3600.0
    story.read(stored(1), event_epoch=int((STORED + days) * 1e9), at=STORED + days)
    within = latest_epoch(STORED)
    story.read(stored(2), event_epoch=within, subject=event_subject("b"))

    story.read(stored(3), event_epoch=int(STORED * 1e9))
    story.read(stored(4), event_epoch=int(STORED * 1e9), subject=event_subject("b"))

    lookup = story.live.index.lookup
    assert [lookup([one]) for one in (1, 2, 3, 4)] == [{}, {"b": 1}, {"a": 1}, {}]


def test_a_rank_that_is_evicted_before_its_first_digest_is_settled_by_that() -> None:
    story = Story()
    story.live.index = RadixIndex(max_blocks=2)
    story.read(stored(1, 2))
    story.read(stored(11), stored(12), stored(13), first_id=1)

    before = story.live.unsettled
    story.read(digest_of(stored(1, 2), stored(11), stored(12), stored(13)), first_id=4)

    assert story.live.index.has_evicted
    assert (before, story.live.unsettled) == ([A], [])


def test_a_late_joiner_is_asked_although_blocks_of_others_were_evicted() -> None:
    story = Story()
    story.live.index = RadixIndex(max_blocks=2)
    story.read(stored(1, 2), stored(3, 4), subject=event_subject("b"))

    story.read(stored(5), first_id=7)
    story.read(digest_of(stored(5)), first_id=8)

    assert A in [rank for rank, _ in story.live.requests(101.0)]


def test_an_instance_that_left_before_it_answered_is_no_longer_waited_for() -> None:
    story = Story()
    story.live.look_at_instances(["a", "gone"], 100.0, can_hear=True)
    story.live.look_at_instances(["a", "gone"], 102.0, can_hear=True)
    before = list(story.live.plan.ranks())

    story.live.look_at_instances(["a"], 103.0, can_hear=True)

    assert sorted(before) == [A, Rank("gone", 0)]
    assert list(story.live.plan.ranks()) == [A]
