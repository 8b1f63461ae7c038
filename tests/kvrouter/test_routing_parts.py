"""The small parts of routing: constraints, policies by name, sessions, the queue."""

from __future__ import annotations

import math

import pytest

from dynbus.bus.errors import ConfigError, InvalidRequest
from dynbus.kvrouter.affinity import SessionAffinity
from dynbus.kvrouter.constraints import NO_CONSTRAINTS, Constraints, read_constraints
from dynbus.kvrouter.cost import Candidate, DynamoCost
from dynbus.kvrouter.index import Rank
from dynbus.kvrouter.policies import load_policy, policy_name
from dynbus.kvrouter.request_fields import field_of
from dynbus.kvrouter.waiting import WaitingQueue

from .routing_fixtures import by_name, profile, shape


def test_constraints_are_read_from_metadata() -> None:
    metadata = {"kv_required_tags": "eu, fast", "kv_preferred_tags": "near=0.5, big"}

    found = read_constraints(metadata, lora_name="sql", lora="require")

    assert found == Constraints(frozenset({"eu", "fast"}), {"near": 0.5, "big": 1.0}, "sql", True)
    assert read_constraints({"other": "x"}) is NO_CONSTRAINTS


@pytest.mark.parametrize("text", ["near=fast", "near=", "near=inf", "near=nan"])
def test_a_weight_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="weight of 'near'"):
        read_constraints({"kv_preferred_tags": text})


def test_preferences_multiply_and_an_adapter_counts_as_one() -> None:
    wanted = Constraints(preferred={"near": 0.5, "far": -2.0}, lora_name="sql")

    assert wanted.multiplier(profile("a")) == 1.0
    assert wanted.multiplier(profile("a", tags="near", loras="sql")) == math.exp(-math.tanh(1.5))
    assert wanted.multiplier(profile("a", tags="far")) > 2.0


def test_a_policy_has_a_name() -> None:
    assert isinstance(load_policy("dynamo"), DynamoCost)
    assert isinstance(load_policy("dynbus.kvrouter.cost:DynamoCost"), DynamoCost)
    assert load_policy("tests.kvrouter.routing_fixtures:by_name") is by_name
    assert policy_name(by_name) == "tests.kvrouter.routing_fixtures:by_name"
    assert policy_name(DynamoCost()) == "dynbus.kvrouter.cost:DynamoCost"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fastest", "is unknown: use one of dynamo, or module:function"),
        ("no.such:f", "ModuleNotFoundError"),
        ("dynbus.kvrouter.cost:nothing", "AttributeError"),
        ("dynbus.kvrouter.cost:NO_OVERLAP", "is a Overlap"),
    ],
)
def test_a_policy_that_is_none_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_policy(name)


def test_sessions_are_forgotten_by_time_and_by_number() -> None:
    affinity = SessionAffinity(ttl=10.0, limit=2)
    wanted, candidates = shape(4), [Candidate(Rank("a", 0)), Candidate(Rank("b", 0))]
    for at, session in enumerate(("one", "two", "three")):
        affinity.bind(session, Rank("b", 0), float(at))

    assert affinity.find("one", wanted, candidates, 3.0) is None
    assert affinity.find("two", wanted, candidates, 3.0) == 1
    assert affinity.find("two", wanted, candidates, 11.0) is None
    assert affinity.find("three", wanted, candidates[:1], 11.0) is None


def test_a_session_bears_load_up_to_a_factor() -> None:
    affinity = SessionAffinity(overload=2.0)
    affinity.bind("s", Rank("a", 0), 0.0)

    def kept(blocks: int) -> bool:
        candidates = [Candidate(Rank("a", 0), active_blocks=blocks), Candidate(Rank("b", 0))]
        return affinity.find("s", shape(4), candidates, 1.0) == 0

    assert kept(8)
    assert not kept(9)


def test_the_queue_serves_the_urgent_first_and_then_by_arrival() -> None:
    queue: WaitingQueue[str] = WaitingQueue(limit=4)
    places = [queue.push(name, priority) for name, priority in (("a", 0), ("b", 5), ("c", 0))]

    assert list(queue) == ["b", "a", "c"]
    assert queue.remove(places[1])
    assert not queue.remove(places[1])
    assert queue.has_before(0)
    assert not queue.has_before(1)


def test_a_full_queue_takes_no_more() -> None:
    queue: WaitingQueue[str] = WaitingQueue(limit=1)
    queue.push("a", 0)

    with pytest.raises(OverflowError, match="1 requests wait"):
        queue.push("b", 9)


def test_a_field_is_an_attribute_or_a_key_at_the_end_of_a_path() -> None:
    class Body:
        prompt = {"ids": [1, 2]}

    assert field_of(Body(), "prompt.ids") == [1, 2]
    assert field_of({"prompt": Body()}, "prompt.prompt.ids") == [1, 2]
    assert field_of(Body(), "prompt.other.ids") is None
