"""`ReuseWatch` finds ranks that are not what they say, and bears with those that nearly are."""

from __future__ import annotations

import numpy as np

from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.routing.caches import FIRST_PATIENCE, LEAST_REQUESTS, ReuseWatch
from dynbus.kvrouter.routing.candidates import Candidate, Candidates
from dynbus.kvrouter.routing.decision import Decision, Reason

A, B = Rank("a", 0), Rank("b", 0)
BLOCK = 16


def decided(rank: Rank, told: int, expected: int, at: float) -> Decision:
    return Decision(
        number=1,
        request_id="r",
        attempt=1,
        decided_at=at,
        prompt_tokens=8192,
        prompt_blocks=512,
        block_size=BLOCK,
        candidates=Candidates.of([Candidate(rank)]),
        costs=np.zeros(1),
        chosen=rank,
        reason=Reason.ONLY_CANDIDATE,
        policy="kv",
        expected_reuse=expected,
        told_reuse=told,
    )


def noted(
    watch: ReuseWatch,
    rank: Rank,
    *,
    told: int,
    reused: int,
    predicted: int | None = None,
    times: int = LEAST_REQUESTS,
    at: float = 1.0,
) -> list[str]:
    """What the watch says to so many equal requests, without what is empty."""
    most = told if predicted is None else predicted
    decision = decided(rank, told, most, at)
    reasons = [watch.note(decision, reused) for _ in range(times)]
    return [reason for reason in reasons if reason]


def test_a_rank_that_reuses_less_than_it_says_is_asked_with_the_mean_difference() -> None:
    watch = ReuseWatch()

    assert noted(watch, A, told=1024, reused=0, times=LEAST_REQUESTS - 1) == []
    (reason,) = noted(watch, A, told=1024, reused=0, times=1)

    assert "1024 tokens fewer than it says" in reason
    assert watch.doubts() == {A: reason}


def test_a_rank_that_reuses_more_than_it_says_is_asked_too() -> None:
    (reason,) = noted(ReuseWatch(), A, told=0, reused=640)

    assert "640 tokens more than it says" in reason


def test_a_block_that_is_computed_again_and_a_cache_that_changes_meanwhile_are_no_lies() -> None:
    watch = ReuseWatch()

    assert noted(watch, A, told=64, reused=48, times=100) == []
    assert noted(watch, B, told=8192, reused=6400, times=100) == []
    assert watch.doubts() == {}


def test_what_was_only_guessed_is_held_against_nobody() -> None:
    watch = ReuseWatch()

    assert noted(watch, A, told=0, predicted=1024, reused=0, times=100) == []
    assert noted(watch, A, told=512, predicted=1024, reused=700, times=100) == []


def test_one_request_among_many_does_not_count_as_a_lie() -> None:
    watch = ReuseWatch()

    assert noted(watch, A, told=1024, reused=1024, times=20) == []
    assert noted(watch, A, told=1024, reused=0, times=1) == []
    assert noted(watch, A, told=1024, reused=1024, times=5) == []


def test_after_a_resync_only_later_decisions_count_and_who_is_right_is_believed_again() -> None:
    watch = ReuseWatch()
    assert noted(watch, A, told=1024, reused=0)
    watch.asked(A, 2.0)

    assert noted(watch, A, told=1024, reused=0, at=1.9, times=50) == []
    assert A in watch.doubts()
    assert noted(watch, A, told=1024, reused=1024, at=3.0) == []
    assert watch.doubts() == {}


def test_who_goes_on_lying_is_asked_ever_more_seldom() -> None:
    watch = ReuseWatch()
    asked: list[int] = []

    for second in range(600):
        if watch.note(decided(A, 1024, 1024, float(second)), 0):
            watch.asked(A, float(second))
            asked.append(second)

    pauses = [later - earlier for earlier, later in zip(asked, asked[1:], strict=False)]
    assert pauses[0] == FIRST_PATIENCE
    assert all(later >= 2 * earlier for earlier, later in zip(pauses, pauses[1:], strict=False))
    assert A in watch.doubts()


def test_an_instance_that_is_gone_is_forgotten() -> None:
    watch = ReuseWatch()
    noted(watch, A, told=1024, reused=0)

    watch.remove_instance("a")

    assert watch.doubts() == {}
