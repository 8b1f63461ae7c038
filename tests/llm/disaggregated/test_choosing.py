"""A decode instance decides by what both sides have to do at the moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import pytest

from dynbus.bus.protocol.wire import InstanceRecord
from dynbus.bus.records.instance_view import Instance
from dynbus.kvrouter.radix import Rank
from dynbus.kvrouter.routing import OVERLAP_KEY
from dynbus.kvrouter.routing.profiles import MODEL_KEY
from dynbus.llm.disaggregated.choosing import PrefillChoice
from dynbus.llm.disaggregated.decision import PrefillReason
from dynbus.llm.disaggregated.settings import DisaggregationSettings
from dynbus.llm.engine.interface import EngineLimits, EngineLoad
from dynbus.llm.generation import GenerateRequest

REQUEST = GenerateRequest(list(range(600)))


class Load(NamedTuple):
    requests: int
    prefill_tokens: int


class Router:
    def __init__(self, **loads: Load) -> None:
        self.loads = loads

    def load(self, rank: Rank) -> Load:
        return self.loads[rank.instance]


class Runner:
    load = EngineLoad(1, 0, 10)
    limits = EngineLimits(
        block_size=16, blocks=100, max_num_seqs=8, context_length=1000, max_num_batched_tokens=512
    )


class Live:
    current = DisaggregationSettings(local_prompt_tokens=100, max_queue_length=2)


def instance(name: str, model: str = "") -> Instance:
    record = InstanceRecord(
        namespace="test",
        component="prefill",
        instance_id=name,
        incarnation="1",
        endpoints={},
        started=0.0,
        metadata={MODEL_KEY: model} if model else {},
    )
    return Instance(record, 0.0)


def choice(*instances: Instance, own: Sequence[str] = (), **loads: Load) -> PrefillChoice:
    router, runner, live = (cast("Any", one) for one in (Router(**loads), Runner(), Live()))
    there = instances or [instance(name) for name in loads]
    return PrefillChoice(router, lambda: there, runner, live, own=set(own), model="mine")


def test_of_the_prompts_that_were_sent_each_instance_computes_one() -> None:
    decision = choice(a=Load(2, 700), b=Load(1, 500)).decide(REQUEST, 0)

    assert decision.reason is PrefillReason.LONG_PROMPT
    assert decision.load.queue_length == 1
    assert decision.load.queued_tokens == 1200


def test_jobs_of_the_queue_count_only_while_prompts_go_by_it() -> None:
    deciding = choice(a=Load(0, 0))

    assert deciding.decide(REQUEST, 0, jobs=5).reason is PrefillReason.QUEUE_FULL
    assert deciding.decide(REQUEST, 0).reason is PrefillReason.LONG_PROMPT


def test_what_the_router_found_in_the_own_cache_is_not_computed() -> None:
    deciding = choice(a=Load(0, 0))
    cached = deciding.cached_tokens({OVERLAP_KEY: "35"})

    assert cached == 560
    assert deciding.decide(REQUEST, cached).reason is PrefillReason.SHORT_PROMPT


def test_without_a_number_of_blocks_nothing_is_cached() -> None:
    deciding = choice()

    assert [deciding.cached_tokens(told) for told in ({}, {OVERLAP_KEY: "-3"})] == [0, 0]
    assert deciding.decide(REQUEST, 0).reason is PrefillReason.NO_PREFILL


def test_an_instance_with_another_model_is_left_out_which_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = [instance("a", "mine"), instance("b", "theirs"), instance("c")]
    deciding = choice(*there, a=Load(0, 0), b=Load(9, 9000), c=Load(0, 0))

    decisions = [deciding.decide(REQUEST, 0) for _ in range(3)]

    assert {decision.load.instances for decision in decisions} == {2}
    assert {decision.load.queued_tokens for decision in decisions} == {0}
    assert [one.id for one in deciding.usable(there)] == ["a", "c"]
    assert caplog.text.count("prefill instance b computes a model of fingerprint theirs") == 1


def test_where_all_compute_another_model_there_is_no_prefill_instance() -> None:
    deciding = choice(instance("b", "theirs"), b=Load(0, 0))

    assert deciding.decide(REQUEST, 0).reason is PrefillReason.NO_PREFILL


def test_an_instance_that_serves_both_roles_computes_no_prompts_for_itself() -> None:
    deciding = choice(instance("a"), instance("b"), own=["a"], b=Load(0, 0))

    assert deciding.decide(REQUEST, 0).load.instances == 1
