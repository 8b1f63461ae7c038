"""What the scheduler decides, whom it lets wait, and what it keeps of each decision."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from dynbus.bus.errors import ConfigError, NoInstances, Overloaded
from dynbus.kvrouter.constraints import Constraints
from dynbus.kvrouter.cost import Candidate, RequestShape
from dynbus.kvrouter.decision import Decision, Reason
from dynbus.kvrouter.index import Rank
from dynbus.kvrouter.scheduler import KvScheduler
from dynbus.kvrouter.scheduling import SchedulerConfig, SchedulingRequest, Ticket

from .routing_fixtures import BLOCK, HandIndex, by_name, profile, request

A, B, C = profile("a"), profile("b"), profile("c")
ABC = [A, B, C]


def decide(scheduler: KvScheduler, wanted: SchedulingRequest, now: float = 0.0) -> Decision:
    answer = scheduler.submit(wanted, now)
    assert isinstance(answer, Decision)
    return answer


def wait(scheduler: KvScheduler, wanted: SchedulingRequest, now: float = 0.0) -> Ticket:
    answer = scheduler.submit(wanted, now)
    assert isinstance(answer, Ticket)
    return answer


# Choosing -----------------------------------------------------------------------------------


def test_a_request_goes_where_most_of_its_prompt_lies() -> None:
    scheduler = KvScheduler(BLOCK, follower=HandIndex(a=1, b=3, c=2))

    decision = decide(scheduler, request("r", ABC))

    assert decision.chosen == Rank("b", 0)
    assert decision.reason is Reason.LOWEST_COST
    assert decision.index_sequence == 7
    assert decision.expected_reuse == 3 * BLOCK


def test_load_outweighs_a_small_overlap() -> None:
    scheduler = KvScheduler(BLOCK, follower=HandIndex(a=1))
    decide(scheduler, request("long", [A], blocks=50, of=1))

    decision = decide(scheduler, request("short", ABC))

    assert decision.chosen.instance in "bc"


def test_what_was_sent_somewhere_counts_there_until_it_ended() -> None:
    scheduler = KvScheduler(BLOCK)

    decision = decide(scheduler, request("r", [A], blocks=4))
    during = scheduler.load.load(Rank("a", 0))
    scheduler.first_item(decision.number, 1.0)
    decoding = scheduler.load.load(Rank("a", 0))
    scheduler.ended(decision.number, 2.0)

    assert (during.prefill_tokens, during.blocks, during.requests) == (64, 4, 1)
    assert (decoding.prefill_tokens, decoding.blocks) == (0, 4)
    assert scheduler.load.load(Rank("a", 0)).requests == 0


def test_two_equal_prompts_go_to_one_instance_before_its_events_come() -> None:
    scheduler = KvScheduler(BLOCK, follower=HandIndex())
    first = decide(scheduler, request("one", ABC, blocks=8))
    scheduler.ended(first.number, 0.1)

    second = decide(scheduler, request("two", ABC, blocks=8), 1.0)

    assert second.chosen == first.chosen
    assert sum(second.predicted) == 8


def test_a_prediction_ends_when_no_event_confirms_it() -> None:
    scheduler = KvScheduler(BLOCK, follower=HandIndex())
    first = decide(scheduler, request("one", ABC, blocks=8))
    scheduler.ended(first.number, 0.1)

    second = decide(scheduler, request("two", ABC, blocks=8), 6.0)

    assert sum(second.predicted) == 0


def test_without_events_own_decisions_count_for_longer_and_as_far_as_there_is_room() -> None:
    small = profile("a", events="false", total_blocks=5)
    scheduler = KvScheduler(BLOCK, config=SchedulerConfig(approximate_ttl=None))
    decide(scheduler, request("one", [small], blocks=4))

    decide(scheduler, request("two", [small], blocks=3, of=1), 1000.0)
    again = decide(scheduler, request("three", [small], blocks=4), 2000.0)

    assert again.awareness.startswith("approximate (")
    assert again.candidates[0].overlap.device == 2


def test_a_rank_is_a_candidate_of_its_own() -> None:
    two = profile("a", dp_size=2)
    scheduler = KvScheduler(BLOCK)

    chosen = [decide(scheduler, request(str(n), [two], of=n)).chosen for n in range(2)]

    assert set(chosen) == {Rank("a", 0), Rank("a", 1)}


def test_equal_instances_are_chosen_equally_often() -> None:
    scheduler = KvScheduler(BLOCK, random=Random(3))

    counts: Counter[str] = Counter()
    for number in range(600):
        decision = decide(scheduler, request(str(number), ABC, of=number))
        scheduler.ended(decision.number, 0.0)
        counts[decision.chosen.instance] += 1

    assert all(150 < counts[name] < 250 for name in "abc")


# Policies -----------------------------------------------------------------------------------


def test_another_policy_decides_from_the_next_request_on() -> None:
    scheduler = KvScheduler(BLOCK, follower=HandIndex(c=4))
    before = decide(scheduler, request("one", ABC))

    scheduler.use_policy(by_name)
    after = decide(scheduler, request("two", ABC))

    assert (before.chosen.instance, after.chosen.instance) == ("c", "a")
    assert after.policy.endswith(":by_name")


@pytest.mark.parametrize("costs", [[1.0], [math.nan] * 3])
def test_costs_that_are_no_costs_are_refused_with_the_name_of_the_policy(
    costs: list[float],
) -> None:
    def broken(request: RequestShape, candidates: Sequence[Candidate]) -> Sequence[float]:
        return costs

    scheduler = KvScheduler(BLOCK, policy=broken)

    with pytest.raises(ConfigError, match=r"broken returned \[.* for 3 candidates"):
        scheduler.submit(request("r", ABC), 0.0)


def test_a_policy_that_raises_is_named_with_what_it_raised() -> None:
    def broken(request: RequestShape, candidates: Sequence[Candidate]) -> Sequence[float]:
        raise KeyError("weights")

    scheduler = KvScheduler(BLOCK, policy=broken)

    with pytest.raises(ConfigError, match="broken raised KeyError: 'weights'"):
        scheduler.submit(request("r", ABC), 0.0)


def test_a_policy_may_refuse_all() -> None:
    scheduler = KvScheduler(BLOCK, policy=lambda request, candidates: [math.inf] * 3)

    with pytest.raises(Overloaded, match="finds none of 3 candidates fit"):
        scheduler.submit(request("r", ABC), 0.0)


def test_shadows_are_compared_and_decide_nothing() -> None:
    def broken(request: RequestShape, candidates: Sequence[Candidate]) -> Sequence[float]:
        raise ValueError("no weights")

    scheduler = KvScheduler(
        BLOCK, follower=HandIndex(c=4), shadows={"names": by_name, "broken": broken}
    )

    decision = decide(scheduler, request("r", ABC))

    names, failed = decision.shadows
    assert decision.chosen == Rank("c", 0)
    assert (names.chosen, names.regret) == (Rank("a", 0), 2.0)
    assert failed.error == "ValueError: no weights"
    assert scheduler.statistics().agreements == {"names": 0, "broken": 0}


# Constraints and sessions -------------------------------------------------------------------


def test_required_tags_and_adapters_exclude_with_the_reason() -> None:
    instances = [profile("a", tags="eu"), profile("b", tags="eu, fast", loras="sql"), C]
    wanted = Constraints(frozenset({"eu"}), lora_name="sql", lora_required=True)
    scheduler = KvScheduler(BLOCK)

    decision = decide(scheduler, request("r", instances, constraints=wanted))

    assert decision.chosen.instance == "b"
    assert decision.reason is Reason.ONLY_CANDIDATE
    assert decision.excluded == {
        "a": "has not loaded the adapter sql",
        "c": "lacks the tags eu",
    }


def test_constraints_that_leave_none_say_so() -> None:
    scheduler = KvScheduler(BLOCK)

    with pytest.raises(NoInstances, match="leave none of 3 instances: a lacks the tags moon"):
        scheduler.submit(request("r", ABC, constraints=Constraints(frozenset({"moon"}))), 0.0)


def test_a_preferred_tag_makes_cheaper_by_its_weight() -> None:
    instances = [profile("a"), profile("b", tags="near")]
    scheduler = KvScheduler(BLOCK, follower=HandIndex(a=1))
    near = Constraints(preferred={"near": 1.0})

    decision = decide(scheduler, request("r", instances, constraints=near))

    assert decision.chosen.instance == "b"
    assert decision.costs == [7.0, pytest.approx(8.0 * math.exp(-math.tanh(1.0)))]


def test_a_session_stays_where_it_was_until_it_is_forgotten() -> None:
    scheduler = KvScheduler(
        BLOCK, follower=HandIndex(a=1), config=SchedulerConfig(session_ttl=10.0)
    )
    first = decide(scheduler, request("one", [B], session="s"))
    scheduler.ended(first.number, 0.0)

    kept = decide(scheduler, request("two", ABC, session="s", of=1), 5.0)
    scheduler.ended(kept.number, 5.0)
    forgotten = decide(scheduler, request("three", ABC, session="s", of=2), 16.0)

    assert (kept.chosen.instance, kept.reason) == ("b", Reason.SESSION)
    assert (forgotten.chosen.instance, forgotten.reason) == ("a", Reason.LOWEST_COST)


def test_a_session_gives_way_when_its_instance_has_too_much_load_or_is_gone() -> None:
    scheduler = KvScheduler(BLOCK, follower=HandIndex())
    first = decide(scheduler, request("one", [A], session="s"))
    scheduler.ended(first.number, 0.0)
    decide(scheduler, request("long", [A], blocks=50, of=1))

    busy = decide(scheduler, request("two", ABC, session="s", of=2))
    gone = decide(scheduler, request("three", [A], session="s", of=3))

    assert busy.chosen.instance in "bc"
    assert gone.chosen.instance == "a"


# Waiting ------------------------------------------------------------------------------------

SMALL = [profile("a", max_batched_tokens=64), profile("b", max_batched_tokens=64)]
QUEUE = SchedulerConfig(queue_threshold=1.0, queue_limit=3)


def fill(scheduler: KvScheduler) -> list[Decision]:
    """Both instances have more to compute than a step takes."""
    return [decide(scheduler, request(f"fill {n}", SMALL, blocks=5, of=90 + n)) for n in range(2)]


def test_requests_wait_while_all_instances_are_busy_and_go_on_by_priority_then_arrival() -> None:
    scheduler = KvScheduler(BLOCK, config=QUEUE)
    running = fill(scheduler)
    first = wait(scheduler, request("first", SMALL, of=1, blocks=5), 1.0)
    second = wait(scheduler, request("second", SMALL, of=2, blocks=5), 2.0)
    urgent = wait(scheduler, request("urgent", SMALL, of=3, blocks=5, priority=5), 3.0)
    assert scheduler.release(3.5) == []

    scheduler.first_item(running[0].number, 4.0)
    ((ticket, decision),) = scheduler.release(4.0)
    scheduler.ended(running[1].number, 5.0)
    ((next_ticket, _),) = scheduler.release(5.0)

    assert (ticket, next_ticket) == (urgent, first)
    assert isinstance(decision, Decision)
    assert decision.chosen == running[0].chosen
    assert decision.waited_s == 4.0
    assert scheduler.withdraw(second)
    assert scheduler.statistics().waiting == 0


def test_who_comes_later_does_not_overtake_who_waits() -> None:
    scheduler = KvScheduler(BLOCK, config=QUEUE)
    running = fill(scheduler)
    wait(scheduler, request("first", SMALL, of=1))

    scheduler.ended(running[0].number, 1.0)
    wait(scheduler, request("second", SMALL, of=2))

    assert scheduler.statistics().waiting == 2


def test_a_full_queue_refuses() -> None:
    scheduler = KvScheduler(BLOCK, config=QUEUE)
    fill(scheduler)
    for number in range(3):
        wait(scheduler, request(f"w{number}", SMALL, of=number))

    with pytest.raises(Overloaded, match="all 2 instances are busy and 3 requests wait") as refused:
        scheduler.submit(request("one more", SMALL, of=50), 0.0)

    assert refused.value.retry_after > 0
    assert scheduler.statistics().refused == 1


def test_an_instance_that_does_not_say_its_limit_is_never_busy() -> None:
    scheduler = KvScheduler(BLOCK, config=QUEUE)

    for number in range(5):
        decide(scheduler, request(str(number), [A], blocks=50, of=number))

    assert scheduler.statistics().waiting == 0


def test_a_new_instance_takes_who_waits() -> None:
    scheduler = KvScheduler(BLOCK, config=QUEUE)
    fill(scheduler)
    ticket = wait(scheduler, request("first", SMALL, of=1))

    scheduler.refresh([*SMALL, profile("c", max_batched_tokens=64)])
    ((released, decision),) = scheduler.release(1.0)

    assert released is ticket
    assert isinstance(decision, Decision)
    assert decision.chosen.instance == "c"


def test_whom_constraints_hold_back_does_not_hold_back_others() -> None:
    instances = [profile("a", max_batched_tokens=64, tags="eu"), SMALL[1]]
    only_a = Constraints(frozenset({"eu"}))
    scheduler = KvScheduler(BLOCK, config=QUEUE)
    for number in range(2):
        decide(scheduler, request(f"fill {number}", [instances[number]], blocks=5, of=90 + number))
    held = wait(scheduler, request("held", instances, of=1, constraints=only_a, priority=9))
    free = wait(scheduler, request("free", instances, of=2))

    scheduler.ended(2, 1.0)
    ((released, _),) = scheduler.release(1.0)

    assert released is free
    assert scheduler.withdraw(held)


# What is kept -------------------------------------------------------------------------------


def test_a_decision_tells_all_candidates_and_what_happened_after() -> None:
    scheduler = KvScheduler(BLOCK, follower=HandIndex(b=3), shadows={"names": by_name})
    decision = decide(scheduler, request("r", ABC), 10.0)

    scheduler.first_item(decision.number, 10.5)
    scheduler.report_reused("r", 32, 10.5)
    scheduler.ended(decision.number, 12.0, "StreamLost")
    told = json.loads(scheduler.decisions.find("r")[0].to_json())

    assert [one["instance"] for one in told["candidates"]][0] == "b"
    assert told["candidates"][0]["overlap"] == {
        "device": 3,
        "host": 0,
        "disk": 0,
        "external": 0,
    }
    assert told["chosen"] == {"instance": "b", "dp_rank": 0}
    assert told["shadows"][0]["chosen"] == {"instance": "a", "dp_rank": 0}
    assert told["outcome"] == {
        "first_item_s": 0.5,
        "reused_tokens": 32,
        "ended_s": 2.0,
        "error": "StreamLost",
    }
    figures = scheduler.statistics()
    assert (figures.best_tokens, figures.expected_tokens) == (48, 48)
    assert (figures.reused_tokens, figures.compared_tokens) == (32, 48)


def test_attempts_of_a_request_are_decisions_of_their_own_and_the_oldest_are_forgotten() -> None:
    scheduler = KvScheduler(BLOCK, config=SchedulerConfig(decisions=3))
    for number in range(2):
        decide(scheduler, request("r", ABC, attempt=number + 1))
    for number in range(2):
        decide(scheduler, request(f"other {number}", ABC))

    assert [one.attempt for one in scheduler.decisions.find("r")] == [2]
    assert [one.request_id for one in scheduler.decisions.latest(2)] == ["other 1", "other 0"]
    assert scheduler.report_reused("unknown", 5, 0.0) is None
