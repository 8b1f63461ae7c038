"""What operators see of a router: how it knows the caches, its figures, and its decisions."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from pydantic import BaseModel

from dynbus import Actor, Runtime, call_options, handler
from dynbus.bus.commands.survey import InstanceReport
from dynbus.bus.drops import DropReason
from dynbus.bus.protocol.names import ComponentName
from dynbus.bus.transport import Message
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.routing.candidates import Candidate, Candidates
from dynbus.kvrouter.routing.decision import (
    Decision,
    Explanation,
    Question,
    Reason,
    encode_explanation,
    why_subject,
)
from dynbus.kvrouter.routing.observing import LOOK_INTERVAL, RouterWatch
from dynbus.kvrouter.routing.router import KvRouter, open_router
from dynbus.kvrouter.routing.router_actor import RouterActor
from dynbus.kvrouter.routing.scheduler import KvScheduler
from dynbus.kvrouter.stream.awareness import AwarenessLevel, CacheAwareness
from dynbus.testing import Telemetry, TestKit, run

from .routing_fixtures import HandIndex, profile, request, until


class Prompt(BaseModel):
    token_ids: list[int]


class Engine(Actor, namespace="llm"):
    def instance_metadata(self) -> Mapping[str, str]:
        return {"kv_block_size": "16", "kv_events": "true"}

    @handler
    async def generate(self, prompt: Prompt) -> AsyncGenerator[dict[str, int], None]:
        yield {"cached_tokens": 0}


class Front(RouterActor, namespace="llm"):
    pass


PROMPT = Prompt(token_ids=list(range(65)))


class Knowing(HandIndex):
    """An index whose awareness the test sets."""

    def __init__(self, level: AwarenessLevel, reason: str = "") -> None:
        super().__init__(a=4)
        self.now = CacheAwareness(level, reason)

    def awareness(self) -> CacheAwareness:
        return self.now


def watch(kit: TestKit, index: HandIndex | None) -> tuple[KvRouter, RouterWatch]:
    router = KvRouter(follower=index)
    return router, RouterWatch(kit.caller.bus, "llm", "Engine", router)


async def ask(
    runtime: Runtime, data: bytes, *, quiet: float = 0.2, component: str = "Engine"
) -> list[Any]:
    """The answers of all routers of the component."""
    answers: list[Any] = []
    inbox = f"{runtime.bus.replies.base}.test"
    connection = runtime.bus.data

    def take(message: Message) -> None:
        if message.data:
            answers.append(json.loads(message.data))

    subscription = connection.subscribe(inbox, take)
    await connection.barrier()
    connection.publish(why_subject("llm", component), data, reply=inbox)
    await asyncio.sleep(quiet)
    subscription.unsubscribe()
    return answers


def question(request_id: str) -> bytes:
    return msgspec.json.encode(Question(request_id))


# Awareness ------------------------------------------------------------------------------------


def test_the_awareness_is_in_the_stats_of_a_router_actor_and_its_process() -> None:
    async def story() -> tuple[Any, dict[str, str], dict[str, str]]:
        async with TestKit() as kit:
            await kit.start(Engine, instance_id="a")
            front = await kit.start(Front, target="llm.Engine.generate", exact=False)
            status = front.server.bus.status
            services: Any = front.__dict__["_services"]
            answer = InstanceReport.read(msgspec.json.encode(services.stats()))
            said = status.read()
            await front.stop()
            return answer, said, status.read()

    answer, said, after = run(story())

    assert answer.status == said
    assert said["cache_aware"].startswith("approximate (own decisions alone")
    assert said["routes_to"] == "llm.Engine"
    assert after == {}


def test_an_engine_beside_a_router_does_not_show_how_far_that_knows_the_caches() -> None:
    async def story() -> tuple[Any, Any]:
        async with TestKit() as kit:
            runtime = await kit.runtime()
            engine = await runtime.start(Engine)
            front = await runtime.start(Front, target="llm.Engine.generate", exact=False)
            answers = [
                InstanceReport.read(msgspec.json.encode(one.__dict__["_services"].stats()))
                for one in (engine, front)
            ]
            return answers[0], answers[1]

    engine, front = run(story())

    assert engine.status == {}
    assert front.status["routes_to"] == "llm.Engine"


def test_each_change_of_the_awareness_is_a_warning_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def story() -> str:
        async with TestKit() as kit:
            index = Knowing(AwarenessLevel.EXACT)
            _, watching = watch(kit, index)
            async with watching:
                index.now = CacheAwareness(AwarenessLevel.DEGRADED, "300 messages behind")
                await asyncio.sleep(2 * LOOK_INTERVAL)
                index.now = CacheAwareness(AwarenessLevel.DEGRADED, "400 messages behind")
                await asyncio.sleep(2 * LOOK_INTERVAL)
                index.now = CacheAwareness(AwarenessLevel.OFF, "no events")
                await asyncio.sleep(2 * LOOK_INTERVAL)
                return kit.caller.bus.status.read()["cache_aware"]

    assert run(story()) == "off (no events)"
    told = [
        (record.levelname, record.message)
        for record in caplog.records
        if "cache_aware" in record.message
    ]
    assert told == [
        ("INFO", "llm.Engine: cache_aware is exact"),
        ("WARNING", "llm.Engine: cache_aware is degraded (300 messages behind), was exact"),
        (
            "WARNING",
            "llm.Engine: cache_aware is off (no events), was degraded (400 messages behind)",
        ),
    ]


@pytest.mark.parametrize("recovers", [True, False])
def test_an_index_that_is_still_empty_is_worth_a_warning_only_when_it_stays_so(
    recovers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def story() -> None:
        async with TestKit() as kit:
            index = Knowing(AwarenessLevel.DEGRADED, "the stream is still being read")
            _, watching = watch(kit, index)
            async with watching:
                if recovers:
                    index.now = CacheAwareness(AwarenessLevel.EXACT)
                await asyncio.sleep(3 * LOOK_INTERVAL)

    run(story())

    levels = [one.levelname for one in caplog.records if "cache_aware" in one.message]
    assert levels == (["INFO"] if recovers else ["WARNING"])


def test_a_look_that_fails_is_logged_and_not_the_last_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Knowing):
        fails = False

        def awareness(self) -> CacheAwareness:
            if self.fails:
                raise ValueError("cannot look")
            return super().awareness()

    async def story() -> str:
        async with TestKit() as kit:
            index = Failing(AwarenessLevel.EXACT)
            _, watching = watch(kit, index)
            async with watching:
                index.fails = True
                await until(lambda: "reading the router's state failed" in caplog.text)
                index.fails = False
                index.now = CacheAwareness(AwarenessLevel.OFF, "no events")
                await until(lambda: "off" in kit.caller.bus.status.read()["cache_aware"])
                return kit.caller.bus.status.read()["cache_aware"]

    assert run(story()) == "off (no events)"


# Metrics --------------------------------------------------------------------------------------


def points(reader: InMemoryMetricReader) -> dict[str, dict[str, float]]:
    """Values by metric, and by the labels beside the target."""
    data = reader.get_metrics_data()
    found: dict[str, dict[str, float]] = {}
    for metric in (
        metric
        for resource in (data.resource_metrics if data is not None else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name.startswith("dynbus.kv.")
    ):
        for point in metric.data.data_points:
            labels: dict[str, Any] = dict(point.attributes or {})
            assert labels.pop("dynbus.namespace") == "llm"
            assert labels.pop("dynbus.component") == "Engine"
            value: Any = getattr(point, "value")  # noqa: B009 - histograms have none
            found.setdefault(metric.name, {})[",".join(map(str, labels.values()))] = value
    return found


def test_figures_of_a_router_are_metrics_while_it_is_open() -> None:
    reader = InMemoryMetricReader()
    telemetry = Telemetry(None, MeterProvider([reader], shutdown_on_exit=False))

    async def story() -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        async with TestKit(telemetry=telemetry) as kit:
            await kit.start(Engine, instance_id="a")
            router, watching = watch(kit, Knowing(AwarenessLevel.DEGRADED, "x"))
            async with watching:
                engine = kit.client(Engine, routing=router)
                for _ in range(3):
                    assert [item async for item in engine.generate(PROMPT)]
                await asyncio.sleep(2 * LOOK_INTERVAL)
                meanwhile = points(reader)
            return meanwhile, points(reader)

    meanwhile, after = run(story())

    assert meanwhile["dynbus.kv.cache_aware"] == {
        "exact": 0,
        "approximate": 0,
        "degraded": 1,
        "off": 0,
    }
    assert meanwhile["dynbus.kv.decisions"] == {"": 3}
    assert meanwhile["dynbus.kv.tokens"] == {
        "prompt": 195,
        "best": 192,
        "expected": 192,
        "compared": 192,
        "reused": 0,
    }
    assert meanwhile["dynbus.kv.hit_rate"] == {"": 192 / 195}
    assert meanwhile["dynbus.kv.waiting"] == {"": 0}
    assert after["dynbus.kv.decisions"] == {"": 3}
    assert "dynbus.kv.cache_aware" not in after


def test_an_index_that_is_followed_has_its_staleness_resyncs_and_blocks_in_the_metrics() -> None:
    reader = InMemoryMetricReader()
    telemetry = Telemetry(None, MeterProvider([reader], shutdown_on_exit=False))

    async def story() -> dict[str, dict[str, float]]:
        async with TestKit(telemetry=telemetry) as kit, open_router(kit.caller, Engine):
            return points(reader)

    names = run(story()).keys()

    assert {"dynbus.kv.staleness", "dynbus.kv.resyncs", "dynbus.kv.index.blocks"} <= names


# Questions ------------------------------------------------------------------------------------


def test_every_open_router_answers_for_a_request_whether_it_knows_it_or_not() -> None:
    async def story() -> list[Any]:
        async with TestKit() as kit:
            await kit.start(Engine, instance_id="a")
            other = await kit.runtime()
            async with (
                open_router(kit.caller, Engine, exact=False) as router,
                open_router(other, Engine, exact=False, share=False),
            ):
                with call_options(request_id="asked"):
                    engine = kit.client(Engine, routing=router)
                    assert [item async for item in engine.generate(PROMPT)]
                return await ask(other, question("asked"))

    knowing, unknowing = sorted(run(story()), key=lambda one: not one["decisions"])

    (decision,) = knowing["decisions"]
    assert decision["chosen"] == {"instance": "a", "dp_rank": 0}
    assert decision["outcome"]["reused_tokens"] == 0
    assert decision["ago_s"] >= 0
    assert (knowing["kept"], knowing["limit"], knowing["target"]) == (1, 512, "llm.Engine")
    assert (unknowing["decisions"], unknowing["kept"], unknowing["oldest_s"]) == ([], 0, None)


def test_a_router_in_a_run_is_for_the_node_of_that_run() -> None:
    async def story() -> list[Any]:
        async with TestKit() as kit:
            name = f"{Engine.__module__}:{Engine.__qualname__}"
            kit.caller.run_addresses = {name: [ComponentName("llm", "staging")]}
            async with open_router(kit.caller, Engine, exact=False, share=False):
                return await ask(await kit.runtime(), question("asked"), component="staging")

    assert [answer["target"] for answer in run(story())] == ["llm.staging"]


def test_a_question_that_is_none_or_has_no_inbox_is_dropped_and_counted() -> None:
    async def story() -> tuple[list[Any], int, int]:
        async with TestKit() as kit:
            asking = await kit.runtime()
            async with open_router(kit.caller, Engine, exact=False):
                answers = await ask(asking, b"nonsense") + await ask(asking, question("x" * 200))
                subject = why_subject("llm", "Engine")
                asking.bus.data.publish(subject, question("a"), reply="$JS.API.STREAM.DELETE.X")
                await asyncio.sleep(0.1)
                drops = kit.caller.bus.drops
                return answers, drops[DropReason.MALFORMED], drops[DropReason.UNSAFE_REPLY]

    assert run(story()) == ([], 2, 1)


BARE = Explanation("r", "p", "llm.Engine", "exact", 512, 512, 0.0)


def decided(candidates: int, chosen: int) -> list[Decision]:
    """Two decisions among so many candidates, each cheaper than the next."""
    ranks = [Rank(f"instance-{number}-{'x' * 30}", 0) for number in range(candidates)]
    return [
        Decision(
            number=number,
            request_id="r",
            attempt=1,
            decided_at=0.0,
            prompt_tokens=64,
            prompt_blocks=4,
            block_size=16,
            candidates=Candidates.of([Candidate(rank) for rank in ranks]),
            costs=np.arange(candidates, dtype=np.float64),
            chosen=ranks[chosen],
            reason=Reason.LOWEST_COST,
            policy="kv",
            expected_reuse=0,
        )
        for number in (1, 2)
    ]


@pytest.mark.parametrize("chosen", [0, 999])
def test_of_too_many_candidates_an_answer_keeps_the_cheapest_and_the_chosen(chosen: int) -> None:
    text = encode_explanation(BARE, decided(1000, chosen), 1.0, 65536)

    assert len(text) <= 65536
    for decision in json.loads(text)["decisions"]:
        names = [one["instance"] for one in decision["candidates"]]
        assert decision["chosen"]["instance"] in names
        assert names[0].startswith("instance-0-")
        assert len(names) > 50
        assert decision["left_out"] == 1000 - len(names)


def test_many_decisions_with_much_in_each_are_told_as_far_as_they_fit_and_soon() -> None:
    scheduler = KvScheduler()
    profiles = [profile(f"instance-{number}") for number in range(200)]
    why = "block sizes differ: the router has 16 tokens, the instance 32: " * 4
    for number in range(512):
        wanted = request("same", profiles, session=str(number) * 2000)
        wanted.excluded = {f"other-{one}": why for one in range(100)}
        scheduler.submit(wanted, 0.0)
    text, spent = b"", list[float]()

    # The least of a few: a processor that others use as well is slower now and then.
    for _ in range(3):
        begun = time.thread_time()
        text = encode_explanation(BARE, scheduler.decisions.find("same"), 1.0, 2**18)
        spent.append(time.thread_time() - begun)

    found = json.loads(text)
    numbers = [one["number"] for one in found["decisions"]]
    assert len(text) <= 2**18
    assert numbers == list(range(numbers[0], 513))
    assert found["decisions_left_out"] == 512 - len(numbers)
    newest = found["decisions"][-1]
    assert len(newest["candidates"]) + newest["left_out"] == 200
    assert len(newest["excluded"]) + newest["excluded_left_out"] == 100
    assert newest["chosen"]["instance"] in [one["instance"] for one in newest["candidates"]]
    assert min(spent) < 0.25


def test_an_answer_that_cannot_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        encode_explanation(BARE, decided(10, 0), 1.0, 100)
