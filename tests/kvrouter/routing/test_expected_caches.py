"""What ranks are taken to hold: what they said, and for some time what was sent to them."""

from __future__ import annotations

import pytest

from dynbus.kvrouter.events import BlockStored
from dynbus.kvrouter.radix.index import Overlap, Rank
from dynbus.kvrouter.routing.active_load import ActiveLoad
from dynbus.kvrouter.routing.caches import ExpectedCaches
from dynbus.kvrouter.routing.candidates import Offer
from dynbus.kvrouter.routing.config import RouterConfig
from dynbus.kvrouter.routing.cost import DynamoCost, RequestShape
from dynbus.kvrouter.routing.profiles import InstanceProfile, read_profile
from dynbus.kvrouter.routing.scheduler import KvScheduler
from dynbus.kvrouter.stream.cache_mirror import CacheMirror
from dynbus.kvrouter.stream.summary import CachesAbroad, summarize

from .routing_fixtures import BLOCK, HandIndex, decide, profile, request, shape

A, B, C = profile("a"), profile("b"), profile("c")
ABC = [A, B, C]


def test_two_equal_prompts_go_to_one_instance_before_its_events_come() -> None:
    scheduler = KvScheduler(follower=HandIndex())
    first = decide(scheduler, request("one", ABC, blocks=8))
    scheduler.ended(first.number, 0.1)

    second = decide(scheduler, request("two", ABC, blocks=8), 1.0)

    assert second.chosen == first.chosen
    assert sum(second.predicted.values()) == 8


def test_a_prediction_ends_when_no_event_confirms_it() -> None:
    scheduler = KvScheduler(follower=HandIndex())
    first = decide(scheduler, request("one", ABC, blocks=8))
    scheduler.ended(first.number, 0.1)

    second = decide(scheduler, request("two", ABC, blocks=8), 6.0)

    assert sum(second.predicted.values()) == 0


def test_a_prompt_that_was_told_and_evicted_is_not_guessed_though_nobody_asked_for_it_between() -> (
    None
):
    index = HandIndex()
    scheduler = KvScheduler(follower=index)
    first = decide(scheduler, request("one", [A], blocks=8))
    scheduler.first_item(first.number, 0.1)
    index.held = {Rank("a", 0): Overlap(8, 0, 0, 0)}
    decide(scheduler, request("other", [A], blocks=8, of=1), 0.2)

    index.held = {}
    again = decide(scheduler, request("again", [A], blocks=8), 0.3)

    assert sum(again.predicted.values()) == 0


def test_a_computed_prompt_is_guessed_until_its_events_come() -> None:
    scheduler = KvScheduler(follower=HandIndex())
    first = decide(scheduler, request("one", [A], blocks=8))
    scheduler.ended(first.number, 0.1)
    for number in range(4):
        decide(scheduler, request(f"other {number}", [A], blocks=2, of=1 + number), 0.2)

    again = decide(scheduler, request("again", [A], blocks=8), 0.3)

    assert sum(again.predicted.values()) == 8


def test_without_events_own_decisions_count_for_longer_and_as_far_as_there_is_room() -> None:
    small = profile("a", events="false", total_blocks=5)
    scheduler = KvScheduler(RouterConfig(approximate_ttl=None))
    decide(scheduler, request("one", [small], blocks=4))

    decide(scheduler, request("two", [small], blocks=3, of=1), 1000.0)
    again = decide(scheduler, request("three", [small], blocks=4), 2000.0)

    assert again.awareness.startswith("approximate (")
    assert again.candidates[0].overlap.device == 2


def expected(caches: ExpectedCaches, wanted: RequestShape, *profiles: InstanceProfile) -> list[int]:
    """How many blocks of a prompt each instance is taken to hold, all of them guessed."""
    overlaps, guessed = caches.overlaps(Offer(profiles), wanted, 1.0)
    assert {at: overlap.total for at, overlap in overlaps.items()} == guessed
    return [guessed.get(at, 0) for at in range(len(profiles))]


@pytest.mark.parametrize("follower", [None, HandIndex()], ids=["approximate", "exact"])
def test_what_another_router_has_sent_somewhere_is_expected_there(
    follower: HandIndex | None,
) -> None:
    caches, wanted = ExpectedCaches(follower, RouterConfig()), shape(4)

    caches.note_elsewhere(Rank("a", 0), wanted.sequence_hashes, 0.0)

    assert expected(caches, wanted, A, B) == [4, 0]


def test_beside_exact_events_what_others_sent_to_an_engine_that_tells_none_is_expected_there() -> (
    None
):
    caches, wanted = ExpectedCaches(HandIndex(), RouterConfig()), shape(4)
    silent = profile("a", events="false")
    caches.note_sent(1, silent, Rank("a", 0), 0, shape(0), 0.0)

    caches.note_elsewhere(Rank("a", 0), wanted.sequence_hashes, 0.5)

    assert expected(caches, wanted, silent, B) == [4, 0]


def test_without_a_time_to_forget_in_what_others_sent_counts_for_instances_known_here_alone() -> (
    None
):
    caches, wanted = ExpectedCaches(None, RouterConfig(approximate_ttl=None)), shape(4)
    caches.note_sent(1, A, Rank("a", 0), 0, shape(0), 0.0)

    for name in ("a", "b"):
        caches.note_elsewhere(Rank(name, 0), wanted.sequence_hashes, 0.5)

    assert expected(caches, wanted, A, B) == [4, 0]


def test_a_prompt_whose_beginning_was_told_and_lost_can_be_sent_again() -> None:
    index = HandIndex()
    scheduler = KvScheduler(follower=index)

    for held, blocks, now in ((0, 10, 0.0), (4, 10, 0.5), (0, 2, 1.0), (0, 10, 1.1)):
        index.held = {Rank("a", 0): Overlap(held, 0, 0, 0)} if held else {}
        decision = decide(scheduler, request(f"at {now}", [A], blocks=blocks), now)
        scheduler.ended(decision.number, now)

    assert isinstance(scheduler.load, ActiveLoad)
    assert len(scheduler.load) == 0


def test_an_instance_that_began_anew_is_taken_to_hold_nothing() -> None:
    scheduler = KvScheduler(RouterConfig(policy=DynamoCost()))
    first = decide(scheduler, request("one", [A]))
    scheduler.ended(first.number, 0.0)

    scheduler.forget_cache("a")
    second = decide(scheduler, request("two", [A]), 1.0)

    assert second.expected_reuse == 0


def test_an_instance_of_another_region_is_taken_at_its_summary_and_asked_for_nothing() -> None:
    index, abroad = HandIndex(), CachesAbroad()
    scheduler = KvScheduler(follower=index, abroad=abroad)
    far, other = (read_profile(name, {"kv_events": "true"}, region="us") for name in "ab")
    cache = CacheMirror()
    cache.store(BlockStored(None, range(1, 7), shape(8).block_hashes[:6]))
    abroad.put(Rank("b", 0), summarize(cache, 1 << 20), 0.0)

    for number in range(20):
        decision = decide(scheduler, request(f"{number}", [far, other], blocks=8), float(number))
        scheduler.note_reused(decision.number, 0, number + 0.1)
        scheduler.ended(decision.number, number + 0.2)
        assert decision.chosen == Rank("b", 0)
        if not number:
            assert decision.told_reuse == 6 * BLOCK

    assert not index.resyncs
