"""What the scheduler decides, whom it lets wait, and what it keeps of each decision."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dynbus.bus.errors import ConfigError, NoInstances, Overloaded
from dynbus.kvrouter.radix.index import Overlap, Rank
from dynbus.kvrouter.routing.constraints import Constraints
from dynbus.kvrouter.routing.cost import Candidate, CostFunction, DynamoCost, RequestShape
from dynbus.kvrouter.routing.decision import Decision, Reason
from dynbus.kvrouter.routing.scheduler import KvScheduler
from dynbus.kvrouter.routing.scheduling import SchedulerConfig, SchedulingRequest, Ticket

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

    with pytest.raises(ConfigError, match=r"broken raised KeyError: 'weights' \(.*\.py, line \d"):
        scheduler.submit(request("r", ABC), 0.0)


def test_the_way_to_a_policys_mistake_is_logged_once_until_another_policy_decides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(request: RequestShape, candidates: Sequence[Candidate]) -> Sequence[float]:
        raise KeyError(request)

    scheduler = KvScheduler(BLOCK, policy=broken)
    for _ in range(3):
        with pytest.raises(ConfigError):
            scheduler.submit(request("r", ABC), 0.0)

    (record,) = caplog.records
    scheduler.use_policy(broken)
    with pytest.raises(ConfigError):
        scheduler.submit(request("r", ABC), 0.0)

    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"queue_threshold": "a"}, "queue_threshold='a': give a number from 0 on"),
        ({"queue_threshold": -3}, "queue_threshold=-3: give"),
        ({"queue_limit": 0}, "queue_limit=0: give a whole number from 1 on"),
        ({"queue_limit": 1.5}, "queue_limit=1.5: give"),
        ({"temperature": -1}, "temperature=-1: give 0"),
        ({"temperature": math.nan}, "temperature=nan: give"),
        ({"temperature": True}, "temperature=True: give"),
        ({"decisions": 0}, "decisions=0: give a whole number from 1 on"),
        ({"prediction_ttl": -1}, "prediction_ttl=-1: give seconds"),
        ({"prediction_ttl": None}, "prediction_ttl=None: give seconds"),
        ({"approximate_ttl": math.inf}, "approximate_ttl=inf: give seconds, or None"),
        ({"session_ttl": -1}, "session_ttl=-1: give seconds"),
        ({"session_overload": 0.5}, "session_overload=0.5: give a factor from 1 on"),
        ({"track_output": "yes"}, "track_output='yes': give True or False"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name_with_what_to_give(
    setting: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(**setting)

    assert str(caught.value).startswith(told)


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


def test_a_shadow_whose_costs_are_none_does_not_count_as_agreeing() -> None:
    def equal(request: RequestShape, candidates: Sequence[Candidate]) -> Any:
        return np.zeros(3, dtype=np.int64)

    shadows: dict[str, CostFunction] = {
        "long": lambda request, candidates: [1.0] * 5,
        "nan": lambda request, candidates: [math.nan] * 3,
        "numpy": equal,
    }
    scheduler = KvScheduler(BLOCK, policy=by_name, shadows=shadows)

    decision = decide(scheduler, request("r", ABC))

    told = json.loads(decision.to_json())["shadows"]
    assert "returned [1.0" in told[0]["error"]
    assert "returned [nan" in told[1]["error"]
    assert told[2]["chosen"] == {"instance": "a", "dp_rank": 0}
    assert scheduler.statistics().agreements == {"long": 0, "nan": 0, "numpy": 1}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_costs_of_numpy_decide_and_can_be_read_afterwards(dtype: type) -> None:
    scheduler = KvScheduler(
        BLOCK,
        policy=lambda request, candidates: np.arange(3, 0, -1).astype(dtype),  # type: ignore[arg-type,return-value]
    )

    decision = decide(scheduler, request("r", ABC))

    told = json.loads(decision.to_json())
    assert [one["cost"] for one in told["candidates"]] == [1.0, 2.0, 3.0]
    assert told["chosen"] == {"instance": "c", "dp_rank": 0}


@pytest.mark.parametrize(
    "costs",
    [{1.0, 2.0, 3.0}, {0: 1, 1: 2, 2: 3}, "123", ["1", "2", "3"], np.ones((3, 1)), [-math.inf] * 3],
)
def test_what_is_no_list_of_numbers_is_refused(costs: object) -> None:
    scheduler = KvScheduler(
        BLOCK,
        policy=lambda request, candidates: costs,  # type: ignore[arg-type,return-value]
        config=SchedulerConfig(temperature=0.5),
    )

    with pytest.raises(ConfigError, match="for 3 candidates: return a list with one number"):
        scheduler.submit(request("r", ABC), 0.0)


def test_costs_as_far_apart_as_numbers_go_can_be_drawn_from() -> None:
    scheduler = KvScheduler(
        BLOCK,
        policy=lambda request, candidates: [-1.7e308, 1.7e308, math.inf],
        config=SchedulerConfig(temperature=0.01),
    )

    assert decide(scheduler, request("r", ABC)).chosen.instance == "a"


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
    scheduler = KvScheduler(BLOCK, policy=DynamoCost(), follower=HandIndex(a=1))
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


def test_who_may_go_anywhere_does_not_wait_behind_who_waits_for_one_instance() -> None:
    scheduler = KvScheduler(BLOCK, config=QUEUE)
    tagged = profile("a", max_batched_tokens=64, tags="eu")
    decide(scheduler, request("busy", [tagged], blocks=5))
    narrow = Constraints(required=frozenset({"eu"}))
    wait(scheduler, request("eu", [tagged, SMALL[1]], of=1, constraints=narrow))

    decision = decide(scheduler, request("any", [tagged, SMALL[1]], of=2))

    assert decision.chosen.instance == "b"


def test_who_waits_for_one_instance_does_not_wait_behind_who_waits_for_any() -> None:
    scheduler = KvScheduler(BLOCK, config=QUEUE)
    tagged = profile("c", max_batched_tokens=64, tags="eu")
    busy = decide(scheduler, request("busy", [tagged], blocks=5))
    fill(scheduler)
    wait(scheduler, request("any", SMALL, of=1, priority=1))
    narrow = Constraints(required=frozenset({"eu"}))
    eu = wait(scheduler, request("eu", [*SMALL, tagged], of=2, constraints=narrow))

    scheduler.ended(busy.number, 1.0)

    assert [ticket for ticket, _ in scheduler.release(1.0)] == [eu]


def test_a_policy_that_fails_for_one_that_waits_fails_for_it_alone() -> None:
    def moody(request: RequestShape, candidates: Sequence[Candidate]) -> Sequence[float]:
        loads = [float(one.active_prefill_tokens) for one in candidates]
        return set(loads) if request.prompt_blocks == 7 else loads  # type: ignore[return-value]

    scheduler = KvScheduler(BLOCK, policy=moody, config=QUEUE)
    running = fill(scheduler)
    tickets = [
        wait(scheduler, request(str(blocks), SMALL, of=blocks, blocks=blocks))
        for blocks in (1, 7, 2)
    ]
    for decision in running:
        scheduler.ended(decision.number, 1.0)

    released = dict(scheduler.release(1.0))

    assert list(released) == tickets
    assert isinstance(released[tickets[1]], ConfigError)
    assert scheduler.statistics().running == 2
    assert scheduler.statistics().waiting == 0


def test_what_breaks_inside_a_decision_is_told_to_the_one_that_waited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(HandIndex):
        def overlaps(self, block_hashes: NDArray[np.uint64]) -> Mapping[Rank, Overlap]:
            if len(block_hashes) == 7:
                raise IndexError("no such block")
            return {}

    scheduler = KvScheduler(BLOCK, follower=Broken(), config=QUEUE)
    running = fill(scheduler)
    tickets = [wait(scheduler, request(str(n), SMALL, of=n, blocks=n)) for n in (7, 1)]
    for decision in running:
        scheduler.ended(decision.number, 1.0)

    (broken, error), (other, answer) = scheduler.release(1.0)

    assert [broken, other] == tickets
    assert isinstance(error, ConfigError)
    assert "IndexError: no such block" in error.message
    assert isinstance(answer, Decision)
    assert "request 7 cannot be routed" in caplog.text


def test_a_prompt_whose_beginning_was_told_and_lost_can_be_sent_again() -> None:
    index = HandIndex()
    scheduler = KvScheduler(BLOCK, follower=index)

    for held, blocks, now in ((0, 10, 0.0), (4, 10, 0.5), (0, 2, 1.0), (0, 10, 1.1)):
        index.held = {Rank("a", 0): Overlap(held, 0, 0, 0)} if held else {}
        decision = decide(scheduler, request(f"at {now}", [A], blocks=blocks), now)
        scheduler.ended(decision.number, now)

    assert len(scheduler.load) == 0  # type: ignore[arg-type]


def test_no_more_tokens_are_reused_than_there_are() -> None:
    scheduler = KvScheduler(BLOCK, follower=HandIndex(a=4))
    decision = decide(scheduler, request("r", ABC))

    scheduler.note_reused(decision.number, 10**400, 1.0)

    assert json.loads(decision.to_json())["outcome"]["reused_tokens"] == 4 * BLOCK
    assert scheduler.statistics().reused_tokens == 4 * BLOCK


def test_an_instance_that_began_anew_is_taken_to_hold_nothing() -> None:
    scheduler = KvScheduler(BLOCK, policy=DynamoCost())
    first = decide(scheduler, request("one", [A]))
    scheduler.ended(first.number, 0.0)

    scheduler.forget_cache("a")
    second = decide(scheduler, request("two", [A]), 1.0)

    assert second.expected_reuse == 0


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
