"""The small parts of routing: constraints, policies by name, sessions, the queue."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import pytest

from dynbus.bus.errors import ConfigError, InvalidRequest
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.routing.affinity import SessionAffinity
from dynbus.kvrouter.routing.constraints import NO_CONSTRAINTS, Constraints, read_constraints
from dynbus.kvrouter.routing.cost import Candidate, DynamoCost
from dynbus.kvrouter.routing.policies import load_policy, policy_name
from dynbus.kvrouter.routing.waiting import WaitingQueue

from .routing_fixtures import by_name, profile, shape


def test_constraints_are_read_from_metadata() -> None:
    metadata = {"kv_required_tags": "eu, fast", "kv_preferred_tags": "near=0.5, big"}

    found = read_constraints(metadata, lora_name="sql", lora="require")

    assert found == Constraints(frozenset({"eu", "fast"}), {"near": 0.5, "big": 1.0}, "sql", True)
    assert read_constraints({"other": "x"}) is NO_CONSTRAINTS


@pytest.mark.parametrize("text", ["near=fast", "near=", "near=inf", "near=nan", "near=1=2"])
def test_a_weight_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="weight of 'near'"):
        read_constraints({"kv_preferred_tags": text})


@pytest.mark.parametrize("text", ["near:0.5", "near*2", "=0.5"])
def test_a_weight_that_is_written_otherwise_is_refused_with_how_to_write_it(text: str) -> None:
    with pytest.raises(InvalidRequest, match="write (tag or )?tag=number"):
        read_constraints({"kv_preferred_tags": text})


def test_a_tag_may_end_as_a_weight_would_when_it_has_one() -> None:
    found = read_constraints({"kv_preferred_tags": "rack:7=1, zone:eu"})

    assert found.preferred == {"rack:7": 1.0, "zone:eu": 1.0}


def test_a_key_of_routing_that_is_unknown_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_constraints({"kv_required_tag": "eu"})

    assert "kv_required_tag is unknown to routing (did you mean kv_required_tags?)" in str(
        caught.value
    )
    assert "kv_required_tags, kv_preferred_tags, kv_track_output" in str(caught.value)


def test_what_a_router_before_has_added_is_no_mistake() -> None:
    assert read_constraints({"kv_dp_rank": "0", "kv_overlap_blocks": "4"}) is NO_CONSTRAINTS


def test_preferences_multiply_and_an_adapter_counts_as_one() -> None:
    wanted = Constraints(preferred={"near": 0.5, "far": -2.0}, lora_name="sql")

    assert wanted.multiplier(profile("a")) == 1.0
    assert wanted.multiplier(profile("a", tags="near", loras="sql")) == math.exp(-math.tanh(1.5))
    assert wanted.multiplier(profile("a", tags="far")) > 2.0


def test_a_policy_has_a_name() -> None:
    assert isinstance(load_policy("dynamo"), DynamoCost)
    assert isinstance(load_policy("dynbus.kvrouter.routing.cost:DynamoCost"), DynamoCost)
    assert load_policy("tests.kvrouter.routing.routing_fixtures:by_name") is by_name
    assert policy_name(by_name) == "tests.kvrouter.routing.routing_fixtures:by_name"
    assert policy_name(DynamoCost()) == "dynbus.kvrouter.routing.cost:DynamoCost"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fastest", "is unknown: use one of dynamo, kv, or module:function$"),
        ("mypol.cost", "or module:function; did you mean mypol:cost?"),
        ("mypol.py", "or module:function, as mypol.py:function"),
        ("no.such:f", "there is no module 'no' in .*tests|there is no module 'no' in /"),
        (
            "dynbus.kvrouter.routing.cost:DynamoCots",
            r"has no 'DynamoCots' \(did you mean DynamoCost\?\)",
        ),
        ("dynbus.kvrouter.routing.cost:NO_OVERLAP", "is a Overlap"),
    ],
)
def test_a_policy_that_is_none_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_policy(name)


@pytest.mark.parametrize(
    "broken",
    [
        "WEIGHT = None\nimport nothing_like_this\n",
        "WEIGHT = None\ndef cots(r, c): return []\n",
        "WEIGHT = None\ncost = 3\n",
        "WEIGHT = None\nclass cost:\n    def __init__(self): raise ValueError\n",
    ],
)
def test_a_policy_goes_on_unharmed_when_its_file_cannot_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    file = tmp_path / "weighty.py"
    monkeypatch.syspath_prepend(str(tmp_path))  # pyright: ignore[reportUnknownMemberType]
    file.write_text("WEIGHT = 2.0\ndef cost(r, c): return [WEIGHT] * len(c)\n")
    try:
        policy = load_policy("weighty:cost")
        file.write_text(broken)

        with pytest.raises(ConfigError, match="weighty:cost"):
            load_policy("weighty:cost", reload=True)

        candidates = [Candidate(Rank("a", 0))]
        assert policy(shape(4), candidates) == [2.0]
        assert load_policy("weighty:cost") is policy
        file.write_text("WEIGHT = 3.0\ndef cost(r, c): return [WEIGHT] * len(c)\n# mended\n")
        assert load_policy("weighty:cost", reload=True)(shape(4), candidates) == [3.0]
        assert policy(shape(4), candidates) == [2.0]
    finally:
        sys.modules.pop("weighty", None)


def test_who_imported_a_policy_before_keeps_it_and_who_imports_it_later_has_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    package = tmp_path / "heavy"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "scale.py").write_text("SCALE = 1.0\n")
    file = package / "costs.py"
    text = "from .scale import SCALE\nWEIGHT = 2.0\ndef cost(r, c): return [WEIGHT * SCALE]\n"
    file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))  # pyright: ignore[reportUnknownMemberType]
    try:
        load_policy("heavy.costs:cost")
        before = importlib.import_module("heavy.costs")
        # As soon after, and as long, as before.
        file.write_text(text.replace("2.0", "3.0"))
        (package / "scale.py").write_text("SCALE = 9.0\n")

        policy = load_policy("heavy.costs:cost", reload=True)

        later = importlib.import_module("heavy.costs")
        assert policy(shape(4), [Candidate(Rank("a", 0))]) == [3.0]
        assert (before.WEIGHT, later.WEIGHT) == (2.0, 3.0)
        assert sys.modules["heavy"].costs is later
    finally:
        for name in ("heavy", "heavy.costs", "heavy.scale"):
            sys.modules.pop(name, None)


def test_sessions_are_forgotten_by_time_and_by_number() -> None:
    affinity = SessionAffinity(ttl=10.0, limit=2)
    wanted, candidates = shape(4), [Candidate(Rank("a", 0)), Candidate(Rank("b", 0))]
    for at, session in enumerate(("one", "two", "three")):
        affinity.bind(session, Rank("b", 0), float(at))

    assert affinity.find("one", wanted, candidates, 3.0) is None
    assert affinity.find("two", wanted, candidates, 3.0) == 1
    assert affinity.find("two", wanted, candidates, 11.0) is None
    assert affinity.find("three", wanted, candidates[:1], 11.0) is None


def test_a_session_that_is_forgotten_at_once_harms_nobody() -> None:
    affinity = SessionAffinity(ttl=0.0)

    affinity.bind("s", Rank("a", 0), 1.0)

    assert affinity.find("s", shape(4), [Candidate(Rank("a", 0))], 1.0) is None


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
    assert queue.has_before(0, lambda name: name == "c")
    assert not queue.has_before(0, lambda name: name == "b")
    assert not queue.has_before(1, lambda name: True)


def test_a_full_queue_takes_no_more() -> None:
    queue: WaitingQueue[str] = WaitingQueue(limit=1)
    queue.push("a", 0)

    with pytest.raises(OverflowError, match="1 requests wait"):
        queue.push("b", 9)
