"""Policies choose instances: in turn, by chance, or by what a router would know."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dynbus.bus.errors import ConfigError
from dynbus.kvrouter.events import BlockStored
from dynbus.kvrouter.routing.candidates import Candidate
from dynbus.kvrouter.routing.config import RouterConfig
from dynbus.kvrouter.routing.cost import RequestShape
from dynbus.kvrouter.routing.decision import Decision
from dynbus.kvrouter.routing.profiles import read_profile
from dynbus.kvrouter.routing.queue import SchedulingRequest
from dynbus.kvrouter.routing.scheduler import KvScheduler
from dynbus.llm.replay.fleet import DelayedIndex
from dynbus.llm.replay.policies import with_policy
from dynbus.llm.replay.simulation import Simulation
from dynbus.llm.replay.trace import read_trace

NAMES = ["a", "b", "c"]


def scheduler(policy: str, follower: DelayedIndex | None = None) -> KvScheduler:
    return KvScheduler(with_policy(RouterConfig(), policy), follower=follower, random=Random(0))


def submit(chosen: KvScheduler, request_id: str, tokens: range = range(64)) -> Decision:
    metadata = {"kv_block_size": "16", "kv_total_blocks": "100", "kv_events": "true"}
    profiles = [read_profile(name, metadata) for name in NAMES]
    shape = RequestShape.of(tokens, 16)
    found = chosen.submit(SchedulingRequest(request_id, shape, profiles, arrived=0.0), 0.0)
    assert isinstance(found, Decision)
    return found


def choices(chosen: KvScheduler, count: int) -> list[str]:
    return [submit(chosen, str(at)).chosen.instance for at in range(count)]


def replayed(policy: str, tmp_path: Path) -> None:
    """Replay one request on three instances."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 64, "output_length": 1, "hash_ids": [1]}\n')
    Simulation(3).run(read_trace(path, block_size=64), policy)


def most_loaded(request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
    """A cost that gathers all requests on one instance."""
    return [-candidate.active_blocks for candidate in candidates]


def shortest(request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
    return [statistics.fmean([])]  # it raises here


def nowhere(request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
    return [float("inf")] * len(candidates)


def test_round_robin_takes_each_instance_in_turn() -> None:
    assert choices(scheduler("round_robin"), 7) == ["a", "b", "c", "a", "b", "c", "a"]


def test_random_takes_every_instance_and_repeats_itself() -> None:
    first = choices(scheduler("random"), 300)

    assert first == choices(scheduler("random"), 300)
    assert min(Counter(first).values()) > 60


def test_dynamos_cost_goes_where_the_prefix_lies() -> None:
    index = DelayedIndex(0.0)
    shape = RequestShape.of(range(64), 16)
    index.tell("b", [BlockStored(None, shape.sequence_hashes, shape.block_hashes)], 0.0)
    index.learn(0.0)

    assert submit(scheduler("dynamo", index), "x").chosen.instance == "b"


def test_load_counts_until_the_request_has_ended() -> None:
    chosen = scheduler("dynamo", DelayedIndex(0.0))
    spread = [submit(chosen, str(at), range(1000 * at, 1000 * at + 64)) for at in range(3)]
    assert sorted(one.chosen.instance for one in spread) == NAMES

    chosen.first_item(spread[1].number, 1.0)
    chosen.ended(spread[1].number, 1.0)

    after = submit(chosen, "next", range(9000, 9064))
    assert after.chosen == spread[1].chosen


def test_a_cost_function_of_ones_own_is_named_by_its_module() -> None:
    chosen = scheduler(f"{__name__}:most_loaded")

    assert len(set(choices(chosen, 5))) == 1
    assert chosen.policy == f"{__name__}:most_loaded"


def test_a_cost_function_that_excludes_everyone_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=":nowhere gives infinity to all 3 instances for request"):
        replayed(f"{__name__}:nowhere", tmp_path)


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
    returned: Any, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(request: RequestShape, candidates: Sequence[Candidate]) -> Any:
        return returned

    monkeypatch.setattr(sys.modules[__name__], "nowhere", broken)

    with pytest.raises(ConfigError, match=rf":nowhere returned {shown} for 3 candidates: return"):
        replayed(f"{__name__}:nowhere", tmp_path)


def test_a_cost_function_that_raises_is_told_with_its_own_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        replayed(f"{__name__}:shortest", tmp_path)

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
        with_policy(RouterConfig(), "roundrobin")


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
        name: sum(request.cached_tokens for request in simulation.run(trace, name).requests)
        for name in ("round_robin", "dynamo")
    }

    assert reused["dynamo"] == 7 * 1024 * (1 + 2 + 3 + 4)
    assert reused["round_robin"] < 0.2 * reused["dynamo"]
