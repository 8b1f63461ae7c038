"""Policies choose instances: in turn, by chance, or by what a router would know."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dynbus.bus.errors import ConfigError
from dynbus.kvrouter.events import BlockStored, encode_events
from dynbus.kvrouter.routing.cost import Candidate, RequestShape
from dynbus.llm.replay.policies import ByCost, Policy, make_policy
from dynbus.llm.replay.simulation import Simulation
from dynbus.llm.replay.trace import read_trace

NAMES = ["a", "b", "c"]


def policy(name: str) -> Policy:
    return make_policy(name, NAMES, block_size=16, total_blocks=100, max_batched_tokens=512)


def choices(chosen: Policy, count: int) -> list[int]:
    shape = RequestShape.of(range(64), 16)
    return [chosen.choose(str(at), shape, shape.sequence_hashes) for at in range(count)]


def most_loaded(request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
    """A cost that gathers all requests on one instance."""
    return [-candidate.active_blocks for candidate in candidates]


def shortest(request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
    return [statistics.fmean([])]  # it raises here


def nowhere(request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
    return [float("inf")] * len(candidates)


def test_round_robin_takes_each_instance_in_turn() -> None:
    assert choices(policy("round_robin"), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_random_takes_every_instance_and_repeats_itself() -> None:
    first = choices(policy("random"), 300)

    assert first == choices(policy("random"), 300)
    assert min(Counter(first).values()) > 60


def test_dynamos_cost_goes_where_the_prefix_lies() -> None:
    chosen = policy("dynamo")
    shape = RequestShape.of(range(64), 16)
    assert chosen.index is not None
    stored = BlockStored(None, shape.sequence_hashes, shape.block_hashes)
    chosen.index.apply("b", encode_events([stored], event_epoch=1, first_id=0))

    assert chosen.choose("x", shape, shape.sequence_hashes) == 1


def test_load_counts_until_the_request_has_ended() -> None:
    chosen = policy("dynamo")
    assert isinstance(chosen, ByCost)
    spread = choices(chosen, 3)
    assert sorted(spread) == [0, 1, 2]

    chosen.first_token("1")
    chosen.ended("1")

    shape = RequestShape.of(range(1000, 1064), 16)
    assert chosen.choose("next", shape, shape.sequence_hashes) == spread[1]


def test_a_cost_function_of_ones_own_is_named_by_its_module() -> None:
    chosen = policy(f"{__name__}:most_loaded")

    assert len(set(choices(chosen, 5))) == 1


def test_a_cost_function_that_excludes_everyone_is_told() -> None:
    with pytest.raises(ConfigError, match=":nowhere gives infinity to all 3 instances for request"):
        choices(policy(f"{__name__}:nowhere"), 1)


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (None, "None"),
        ([1.0, 2.0], r"\[1.0, 2.0\]"),
        ([1.0, 2.0, math.nan], r"\[1.0, 2.0, nan\]"),
        ([1.0, 2.0, -math.inf], r"\[1.0, 2.0, -inf\]"),
        (["1", "2", "3"], r"\['1', '2', '3'\]"),
        ("abc", "'abc'"),
        ([None, 1.0, 2.0], r"\[None, 1.0, 2.0\]"),
    ],
)
def test_what_a_cost_function_returns_is_checked_as_the_router_checks_it(
    returned: Any, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: RequestShape, candidates: Sequence[Candidate]) -> Any:
        return returned

    monkeypatch.setattr(sys.modules[__name__], "nowhere", broken)

    with pytest.raises(ConfigError, match=rf":nowhere returned {shown} for 3 candidates: return"):
        choices(policy(f"{__name__}:nowhere"), 1)


def test_a_cost_function_that_raises_is_told_with_its_own_line() -> None:
    with pytest.raises(ConfigError) as raised:
        choices(policy(f"{__name__}:shortest"), 1)

    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.endswith("# it raises here")
    )
    assert ":shortest raised StatisticsError: " in str(raised.value)
    assert str(raised.value).endswith(f"({__file__}, line {line})")


def test_a_policy_that_nobody_knows_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match="'roundrobin' is unknown: use one of round_robin, random,"
    ):
        policy("roundrobin")


def test_looking_at_prefixes_finds_those_of_a_conversation(tmp_path: Path) -> None:
    turns = [
        {
            "timestamp": 4000 * turn + 500 * conversation,
            "input_length": 1024 * (turn + 1),
            "output_length": 20,
            "hash_ids": [100 * conversation + block for block in range(2 * (turn + 1))],
        }
        for turn in range(5)
        for conversation in range(7)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    trace = read_trace(path, block_size=64)
    simulation = Simulation(4)

    reused = {
        name: sum(record.cached_tokens for record in simulation.run(trace, name).records)
        for name in ("round_robin", "dynamo")
    }

    assert reused["dynamo"] == 7 * 1024 * (1 + 2 + 3 + 4)
    assert reused["round_robin"] < 0.2 * reused["dynamo"]
