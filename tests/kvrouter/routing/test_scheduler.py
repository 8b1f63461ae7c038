"""What the scheduler decides, and what it keeps of each decision."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from dynbus.bus.errors import ConfigError, NoInstances, Overloaded
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.routing.candidates import Candidate
from dynbus.kvrouter.routing.config import RouterConfig
from dynbus.kvrouter.routing.cost import CostFunction, DynamoCost, RequestShape
from dynbus.kvrouter.routing.decision import Reason
from dynbus.kvrouter.routing.profiles import InstanceProfile
from dynbus.kvrouter.routing.requests import Constraints
from dynbus.kvrouter.routing.scheduler import KvScheduler

from .routing_fixtures import BLOCK, HandIndex, by_name, decide, profile, request

A, B, C = profile("a"), profile("b"), profile("c")
ABC = [A, B, C]


# Choosing -----------------------------------------------------------------------------------


def test_a_request_goes_where_most_of_its_prompt_lies() -> None:
    scheduler = KvScheduler(follower=HandIndex(a=1, b=3, c=2))

    decision = decide(scheduler, request("r", ABC))

    assert decision.chosen == Rank("b", 0)
    assert decision.reason is Reason.LOWEST_COST
    assert decision.index_sequence == 7
    assert decision.expected_reuse == 3 * BLOCK


def test_load_outweighs_a_small_overlap() -> None:
    scheduler = KvScheduler(follower=HandIndex(a=1))
    decide(scheduler, request("long", [A], blocks=50, of=1))

    decision = decide(scheduler, request("short", ABC))

    assert decision.chosen.instance in "bc"


def test_what_was_sent_somewhere_counts_there_until_it_ended() -> None:
    scheduler = KvScheduler()

    decision = decide(scheduler, request("r", [A], blocks=4))
    during = scheduler.load.of(Rank("a", 0))
    scheduler.first_item(decision.number, 1.0)
    decoding = scheduler.load.of(Rank("a", 0))
    scheduler.ended(decision.number, 2.0)

    assert (during.prefill_tokens, during.blocks, during.requests) == (64, 4, 1)
    assert (decoding.prefill_tokens, decoding.blocks) == (0, 4)
    assert scheduler.load.of(Rank("a", 0)).requests == 0


def test_a_rank_is_a_candidate_of_its_own() -> None:
    two = profile("a", dp_size=2)
    scheduler = KvScheduler()

    chosen = [decide(scheduler, request(str(n), [two], of=n)).chosen for n in range(2)]

    assert set(chosen) == {Rank("a", 0), Rank("a", 1)}


def test_equal_instances_are_chosen_equally_often() -> None:
    scheduler = KvScheduler(random=Random(3))

    counts: Counter[str] = Counter()
    for number in range(600):
        decision = decide(scheduler, request(str(number), ABC, of=number))
        scheduler.ended(decision.number, 0.0)
        counts[decision.chosen.instance] += 1

    assert all(150 < counts[name] < 250 for name in "abc")


# Blocks elsewhere ---------------------------------------------------------------------------


def fetching(name: str) -> InstanceProfile:
    return profile(name, fetches="true")


def test_a_rank_may_fetch_what_the_best_other_instance_holds_beyond_its_own() -> None:
    profiles = [fetching("a"), fetching("b"), fetching("c")]
    scheduler = KvScheduler(follower=HandIndex(a=1, b=3, c=2))

    decision = decide(scheduler, request("r", profiles))

    assert [one.peer_blocks for one in decision.candidates] == [2, 0, 1]
    assert (decision.chosen.instance, decision.peer) == ("b", None)


def test_a_decision_names_the_peer_that_holds_what_the_chosen_rank_lacks() -> None:
    scheduler = KvScheduler(follower=HandIndex(b=4))
    decide(scheduler, request("long", [fetching("b")], blocks=60, of=1))

    decision = decide(scheduler, request("r", [fetching("a"), fetching("b")]))

    told = decision.as_dict()
    assert decision.chosen == Rank("a", 0)
    assert (decision.peer, decision.peer_overlap) == (Rank("b", 0), 4)
    assert told["peer"] == {"instance": "b", "dp_rank": 0}
    assert told["candidates"][0]["peer_blocks"] == 4


def test_an_instance_that_does_not_fetch_neither_gets_nor_gives_blocks() -> None:
    scheduler = KvScheduler(follower=HandIndex(b=4))

    for one, other in (("a", "b"), ("b", "a")):
        profiles = sorted([fetching(one), profile(other)], key=lambda known: known.instance)
        decision = decide(scheduler, request("r", profiles))
        assert [known.peer_blocks for known in decision.candidates] == [0, 0]


def test_a_peer_with_another_model_is_named_to_nobody() -> None:
    mine, theirs = (replace(fetching(name), model=model) for name, model in ("ax", "by"))
    alike = replace(fetching("c"), model="x")
    scheduler = KvScheduler(follower=HandIndex(b=4, c=2))

    alone = decide(scheduler, request("r", [mine, theirs]))
    decision = decide(scheduler, request("s", [mine, theirs, alike]))

    assert [one.peer_blocks for one in alone.candidates] == [0, 0]
    assert [one.peer_blocks for one in decision.candidates] == [2, 0, 0]


def test_a_peer_in_another_zone_is_named_to_nobody() -> None:
    here, there, beside = (
        replace(fetching(name), zone=zone) for name, zone in (("a", "e"), ("b", "w"), ("c", "e"))
    )
    scheduler = KvScheduler(follower=HandIndex(b=4, c=2))

    decision = decide(scheduler, request("r", [here, there, beside]))

    assert [one.peer_blocks for one in decision.candidates] == [2, 0, 0]


def test_a_request_stays_in_its_zone_unless_more_is_saved_elsewhere_than_the_way_takes() -> None:
    scheduler = KvScheduler(follower=HandIndex(b=40))

    far, farther = (
        decide(scheduler, replace(request(str(ms), [A, B], blocks=40), hops={"b": ms}))
        for ms in (100.0, 200.0)
    )

    assert (far.chosen.instance, farther.chosen.instance) == ("b", "a")
    assert [one.hop_ms for one in farther.candidates] == [0.0, 200.0]


def test_no_more_is_expected_of_a_peer_than_it_lends() -> None:
    mine, generous = fetching("a"), replace(fetching("b"), lends=3)
    scheduler = KvScheduler(follower=HandIndex(b=4, c=4))

    alone = decide(scheduler, request("r", [mine, replace(generous, lends=1)]))
    decision = decide(scheduler, request("s", [mine, replace(fetching("c"), lends=2), generous]))

    assert [one.peer_blocks for one in alone.candidates] == [1, 0]
    assert [one.peer_blocks for one in decision.candidates] == [3, 0, 0]


def test_what_is_only_guessed_of_a_peer_is_not_to_be_fetched() -> None:
    profiles = [fetching("a"), fetching("b")]
    scheduler = KvScheduler(follower=HandIndex())
    sent = decide(scheduler, request("first", profiles)).chosen

    decision = decide(scheduler, request("second", profiles))

    assert decision.chosen == sent
    assert [one.peer_blocks for one in decision.candidates] == [0, 0]


# Policies -----------------------------------------------------------------------------------


def test_another_policy_decides_from_the_next_request_on() -> None:
    scheduler = KvScheduler(follower=HandIndex(c=4))
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

    scheduler = KvScheduler(RouterConfig(policy=broken))

    with pytest.raises(ConfigError, match=r"broken returned \[.* for 3 candidates"):
        scheduler.submit(request("r", ABC), 0.0)


def test_a_policy_that_raises_is_named_with_what_it_raised() -> None:
    def broken(request: RequestShape, candidates: Sequence[Candidate]) -> Sequence[float]:
        raise KeyError("weights")

    scheduler = KvScheduler(RouterConfig(policy=broken))

    with pytest.raises(ConfigError, match=r"broken raised KeyError: 'weights' \(.*\.py, line \d"):
        scheduler.submit(request("r", ABC), 0.0)


def test_a_policy_cannot_change_the_candidates_that_its_costs_are_of() -> None:
    def sorts(request: RequestShape, candidates: Any) -> Sequence[float]:
        candidates.sort()
        return [0.0, 1.0, 2.0]

    scheduler = KvScheduler(RouterConfig(policy=sorts), follower=HandIndex(c=4))

    with pytest.raises(ConfigError, match="sorts raised AttributeError: 'tuple' object has no"):
        scheduler.submit(request("r", ABC), 0.0)


def test_a_policy_that_is_asynchronous_is_told_to_be_none() -> None:
    async def waits(request: RequestShape, candidates: Sequence[Candidate]) -> Sequence[float]:
        return [0.0] * len(candidates)

    policy: Any = waits
    scheduler = KvScheduler(RouterConfig(policy=policy))

    with pytest.raises(ConfigError, match="waits is asynchronous: write `def`"):
        scheduler.submit(request("r", ABC), 0.0)


def test_the_way_to_a_policys_mistake_is_logged_once_until_another_policy_decides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(request: RequestShape, candidates: Sequence[Candidate]) -> Sequence[float]:
        raise KeyError(request)

    scheduler = KvScheduler(RouterConfig(policy=broken))
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
        ({"queue_threshold": "a"}, "queue_threshold='a': give a number of at least 0"),
        ({"queue_threshold": -3}, "queue_threshold=-3: give"),
        ({"queue_limit": 0}, "queue_limit=0: give a whole number of at least 1"),
        ({"queue_limit": 1.5}, "queue_limit=1.5: give"),
        ({"temperature": -1}, "temperature=-1: give a number of at least 0"),
        ({"temperature": math.nan}, "temperature=nan: give"),
        ({"temperature": True}, "temperature=True: give"),
        ({"decisions": 0}, "decisions=0: give a whole number of at least 1"),
        ({"prediction_ttl": -1}, "prediction_ttl=-1: give a number of seconds, at least 0"),
        ({"prediction_ttl": None}, "prediction_ttl=None: give a number of seconds"),
        (
            {"approximate_ttl": math.inf},
            "approximate_ttl=inf: give a number of seconds, at least 0, or None",
        ),
        ({"session_ttl": -1}, "session_ttl=-1: give a number of seconds"),
        ({"session_overload": 0.5}, "session_overload=0.5: give a number of at least 1"),
        ({"track_output": "yes"}, "track_output='yes': give True or False"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name_with_what_to_give(
    setting: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(**setting)

    assert str(caught.value).startswith(told)


def test_a_policy_may_refuse_all() -> None:
    scheduler = KvScheduler(RouterConfig(policy=lambda request, candidates: [math.inf] * 3))

    with pytest.raises(Overloaded, match="gives infinity to all 3 candidates"):
        scheduler.submit(request("r", ABC), 0.0)


def test_shadows_are_compared_and_decide_nothing() -> None:
    def broken(request: RequestShape, candidates: Sequence[Candidate]) -> Sequence[float]:
        raise ValueError("no weights")

    scheduler = KvScheduler(
        RouterConfig(shadows={"names": by_name, "broken": broken}), follower=HandIndex(c=4)
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
    scheduler = KvScheduler(RouterConfig(policy=by_name, shadows=shadows))

    decision = decide(scheduler, request("r", ABC))

    told = json.loads(decision.to_json())["shadows"]
    assert "returned [1.0" in told[0]["error"]
    assert "returned [nan" in told[1]["error"]
    assert told[2]["chosen"] == {"instance": "a", "dp_rank": 0}
    assert scheduler.statistics().agreements == {"long": 0, "nan": 0, "numpy": 1}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_costs_of_numpy_decide_and_can_be_read_afterwards(dtype: type) -> None:
    scheduler = KvScheduler(
        RouterConfig(
            policy=lambda request, candidates: np.arange(3, 0, -1).astype(dtype),  # type: ignore[arg-type,return-value]
        )
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
        RouterConfig(
            policy=lambda request, candidates: costs,  # type: ignore[arg-type,return-value]
            temperature=0.5,
        )
    )

    with pytest.raises(ConfigError, match="for 3 candidates: return a list with one number"):
        scheduler.submit(request("r", ABC), 0.0)


def test_costs_as_far_apart_as_numbers_go_can_be_drawn_from() -> None:
    scheduler = KvScheduler(
        RouterConfig(
            policy=lambda request, candidates: [-1.7e308, 1.7e308, math.inf], temperature=0.01
        )
    )

    assert decide(scheduler, request("r", ABC)).chosen.instance == "a"


# Constraints and sessions -------------------------------------------------------------------


def test_required_tags_and_adapters_exclude_with_the_reason() -> None:
    instances = [profile("a", tags="eu"), profile("b", tags="eu, fast", loras="sql"), C]
    wanted = Constraints(frozenset({"eu"}), lora_name="sql", lora_required=True)
    scheduler = KvScheduler()

    decision = decide(scheduler, request("r", instances, constraints=wanted))

    assert decision.chosen.instance == "b"
    assert decision.reason is Reason.ONLY_CANDIDATE
    assert decision.excluded == {
        "a": "has not loaded the adapter sql",
        "c": "lacks the tags eu",
    }


def test_constraints_that_leave_none_say_so() -> None:
    scheduler = KvScheduler()

    with pytest.raises(NoInstances, match="leave none of 3 instances: a lacks the tags moon"):
        scheduler.submit(request("r", ABC, constraints=Constraints(frozenset({"moon"}))), 0.0)


def test_a_preferred_tag_makes_cheaper_by_its_weight() -> None:
    instances = [profile("a"), profile("b", tags="near")]
    scheduler = KvScheduler(RouterConfig(policy=DynamoCost()), follower=HandIndex(a=1))
    near = Constraints(preferred={"near": 1.0})

    decision = decide(scheduler, request("r", instances, constraints=near))

    assert decision.chosen.instance == "b"
    assert decision.costs.tolist() == [7.0, pytest.approx(8.0 * math.exp(-math.tanh(1.0)))]


def test_a_list_of_instances_that_is_changed_is_another_offer() -> None:
    scheduler = KvScheduler(follower=HandIndex())
    offered = [A]
    assert decide(scheduler, request("one", offered)).chosen.instance == "a"

    offered.append(B)
    two = decide(scheduler, request("two", offered, of=1, constraints=Constraints()))
    offered.remove(A)
    three = decide(scheduler, request("three", offered, of=2))

    assert [rank.instance for rank in two.candidates.ranks] == ["a", "b"]
    assert three.chosen.instance == "b"


def test_a_session_stays_where_it_was_until_it_is_forgotten() -> None:
    scheduler = KvScheduler(RouterConfig(session_ttl=10.0), follower=HandIndex(a=1))
    first = decide(scheduler, request("one", [B], session="s"))
    scheduler.ended(first.number, 0.0)

    kept = decide(scheduler, request("two", ABC, session="s", of=1), 5.0)
    scheduler.ended(kept.number, 5.0)
    forgotten = decide(scheduler, request("three", ABC, session="s", of=2), 16.0)

    assert (kept.chosen.instance, kept.reason) == ("b", Reason.SESSION)
    assert (forgotten.chosen.instance, forgotten.reason) == ("a", Reason.LOWEST_COST)


def test_a_session_gives_way_when_its_instance_has_too_much_load_or_is_gone() -> None:
    scheduler = KvScheduler(follower=HandIndex())
    first = decide(scheduler, request("one", [A], session="s"))
    scheduler.ended(first.number, 0.0)
    decide(scheduler, request("long", [A], blocks=50, of=1))

    busy = decide(scheduler, request("two", ABC, session="s", of=2))
    gone = decide(scheduler, request("three", [A], session="s", of=3))

    assert busy.chosen.instance in "bc"
    assert gone.chosen.instance == "a"


def test_no_more_tokens_are_reused_than_there_are() -> None:
    scheduler = KvScheduler(follower=HandIndex(a=4))
    decision = decide(scheduler, request("r", ABC))

    scheduler.note_reused(decision.number, 10**400, 1.0)

    assert json.loads(decision.to_json())["outcome"]["reused_tokens"] == 4 * BLOCK
    assert scheduler.statistics().reused_tokens == 4 * BLOCK


# What is kept -------------------------------------------------------------------------------


def test_a_decision_tells_all_candidates_and_what_happened_after() -> None:
    scheduler = KvScheduler(RouterConfig(shadows={"names": by_name}), follower=HandIndex(b=3))
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
    scheduler = KvScheduler(RouterConfig(decisions=3))
    for number in range(2):
        decide(scheduler, request("r", ABC, attempt=number + 1))
    for number in range(2):
        decide(scheduler, request(f"other {number}", ABC))

    assert [one.attempt for one in scheduler.decisions.find("r")] == [2]
    assert [one.request_id for one in scheduler.decisions.latest(2)] == ["other 1", "other 0"]
    assert scheduler.report_reused("unknown", 5, 0.0) is None
