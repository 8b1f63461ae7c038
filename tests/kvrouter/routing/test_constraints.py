"""What a call asks of instances is read from its metadata, and weighed."""

from __future__ import annotations

import math

import pytest

from dynbus.bus.errors import InvalidRequest
from dynbus.kvrouter.routing.requests import NO_CONSTRAINTS, Constraints, read_constraints

from .routing_fixtures import profile


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

    assert "kv_required_tag is not a key of routing (did you mean kv_required_tags?)" in str(
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
