"""The autoscaler on a bus: what it sees there, who of several decides, and whom it asks."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from tests.conditions import eventually

from dynbus.actors.declaring.handlers import handler
from dynbus.actors.runtime import Actor, ActorInstance
from dynbus.bus.errors import ConfigError, Unavailable
from dynbus.bus.protocol.names import ComponentName
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.mock.worker import MockWorker
from dynbus.llm.scaling.autoscaler import Autoscaler, TargetsShown, parse_pool
from dynbus.llm.scaling.hands import Hands
from dynbus.llm.scaling.observation import PoolLoad, PoolState, PoolTarget
from dynbus.llm.scaling.observing import PoolSurvey
from dynbus.llm.scaling.policy import PoolConfig
from dynbus.testing import Telemetry, TestKit, run

POOL = "llm.MockWorker"
GRACE = 600.0


class Orchestrator:
    """Starts and drains instances in a kit, as it is asked to.

    Attributes:
        asked: the numbers, in order.
        refuses: whether it does nothing.
    """

    def __init__(self, kit: TestKit) -> None:
        self.kit = kit
        self.asked: list[int] = []
        self.refuses = False
        self.instances: list[ActorInstance] = []

    async def set(self, pool: ComponentName, target: PoolTarget) -> None:
        self.asked.append(target.desired)
        if self.refuses:
            raise Unavailable("there is no GPU")
        while len(self.instances) < target.desired:
            self.instances.append(
                await self.kit.start(MockWorker, speedup_ratio=0.2, max_num_seqs=4)
            )
        while len(self.instances) > target.desired:
            await self.instances.pop().stop(GRACE)


class Silent(Actor, namespace="llm", component="MockWorker"):
    """An instance of the pool that has no engine to tell of."""

    @handler
    async def generate(self, request: GenerateRequest) -> int:
        return 0


class InKit(Autoscaler, namespace="llm", component="Autoscaler"):
    """An autoscaler whose hands are in the test."""

    orchestrator: Orchestrator

    def make_hands(self, exits: AsyncExitStack) -> list[Hands]:
        return [self.orchestrator]


async def start(
    kit: TestKit,
    orchestrator: Orchestrator,
    pool: str = "0:3",
    cold_start: float = 5.0,
    **options: Any,
) -> ActorInstance:
    InKit.orchestrator = orchestrator
    return await kit.start(
        InKit,
        pools=[f"{POOL}={pool}"],
        ttft=5.0,
        itl=0.5,
        cold_start=cold_start,
        drain=5.0,
        down_after=30.0,
        hold=60.0,
        interval=1.0,
        **options,
    )


async def shown(kit: TestKit) -> TargetsShown:
    return await kit.client(InKit).targets()


async def tokens(kit: TestKit, count: int) -> int:
    """The number of tokens that came of a stream."""
    request = GenerateRequest(list(range(2000)), count)
    return sum([len(each.token_ids) async for each in kit.client(MockWorker).generate(request)])


def test_instances_come_with_the_load_go_after_it_and_no_stream_ends_early() -> None:
    """Dynamo #13565: figures that are not taken for those of an instance, and drains that cut."""

    async def story() -> tuple[list[int], list[int], int]:
        async with TestKit() as kit:
            orchestrator = Orchestrator(kit)
            await orchestrator.set(ComponentName.parse(POOL), PoolTarget(1, ""))
            await start(kit, orchestrator, "1:3")

            async with asyncio.TaskGroup() as tasks:
                long = tasks.create_task(tokens(kit, 4000))
                streams = [tasks.create_task(tokens(kit, 100)) for _ in range(30)]

                async def is_larger() -> bool:
                    return len(orchestrator.instances) > 1

                await eventually(is_larger, what="the pool grows")

            async def is_small() -> bool:
                return len(orchestrator.instances) == 1

            await eventually(is_small, what="the pool shrinks")
            return orchestrator.asked, [each.result() for each in streams], long.result()

    asked, lengths, longest = run(story())

    assert max(asked) > 1
    assert asked[-1] == 1
    assert lengths == [100] * 30
    assert longest == 4000


def test_a_request_that_is_held_brings_the_first_instance() -> None:
    async def story() -> list[int]:
        async with TestKit() as kit:
            orchestrator = Orchestrator(kit)
            scaler = await start(kit, orchestrator)
            await eventually(partial(_is_elected, kit), what="it decides")
            held = scaler.actor.runtime.bus.held

            with held.hold("mine", [ComponentName.parse(POOL)]):

                async def is_there() -> bool:
                    return len(orchestrator.instances) == 1

                await eventually(is_there, what="an instance comes")
            return orchestrator.asked

    assert run(story())[0] == 1


async def _is_elected(kit: TestKit) -> bool:
    return (await shown(kit)).elected


def test_what_was_not_done_is_asked_for_again_and_shown() -> None:
    async def story() -> tuple[TargetsShown, TargetsShown]:
        async with TestKit() as kit:
            orchestrator = Orchestrator(kit)
            orchestrator.refuses = True
            await start(kit, orchestrator, "1:3")

            async def is_tried_again() -> bool:
                return len(orchestrator.asked) > 2

            await eventually(is_tried_again, what="it asks again")
            before = await shown(kit)
            orchestrator.refuses = False

            async def is_there() -> bool:
                return bool(orchestrator.instances)

            await eventually(is_there, what="an instance comes")
            return before, await shown(kit)

    before, after = run(story())

    assert [(each.desired, each.acted, each.problem) for each in before.pools] == [
        (1, False, "there is no GPU")
    ]
    assert [(each.desired, each.problem) for each in after.pools] == [(1, "")]


def test_a_number_is_asked_for_again_where_another_one_may_have_been_carried_out_since() -> None:
    async def story() -> list[int]:
        async with TestKit() as kit:
            orchestrator = Orchestrator(kit)
            orchestrator.refuses = True
            scaler = await start(kit, orchestrator)
            await eventually(partial(_is_elected, kit), what="it decides")
            held = scaler.actor.runtime.bus.held

            async def has(desired: int) -> bool:
                return [each.desired for each in (await shown(kit)).pools] == [desired]

            # What is held has it ask for one, and when that does not come, for none.
            with held.hold("mine", [ComponentName.parse(POOL)]):
                await eventually(partial(has, 1), what="one is asked for")
                await eventually(partial(has, 0), what="none is asked for")
            return orchestrator.asked

    assert set(run(story())) == {0, 1}


def test_of_two_one_decides_and_the_other_takes_its_place() -> None:
    async def story() -> tuple[int, bool]:
        async with TestKit() as kit:
            orchestrator = Orchestrator(kit)
            first = await start(kit, orchestrator, "1:3")
            await eventually(partial(_is_elected, kit), what="the first decides")
            second = await start(kit, orchestrator, "1:3")
            assert isinstance(second.actor, InKit)
            waiting = await second.actor.targets()

            await kit.kill(first)

            async def has_second() -> bool:
                assert isinstance(second.actor, InKit)
                return (await second.actor.targets()).elected

            await eventually(has_second, what="the second decides")
            return len(waiting.pools), waiting.elected

    assert run(story()) == (0, False)


def test_the_gauge_has_what_was_there_when_what_was_asked_for_before_may_have_started() -> None:
    """Who goes by it would end instances that still start."""
    reader = InMemoryMetricReader()

    def gauge() -> list[float]:
        data = reader.get_metrics_data()
        metrics = [
            metric
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == "dynbus.autoscaler.desired"
        ]
        return [getattr(point, "value", 0.0) for one in metrics for point in one.data.data_points]

    async def story() -> tuple[list[float], list[float]]:
        async with TestKit(telemetry=Telemetry(None, MeterProvider([reader]))) as kit:
            await kit.start(MockWorker)
            await start(kit, Orchestrator(kit), "0:3", cold_start=20.0)

            async def has_decided() -> bool:
                return bool((await shown(kit)).pools)

            await eventually(has_decided, what="it decides")
            await anyio.sleep(10.0)
            before = gauge()
            await anyio.sleep(15.0)
            return before, gauge()

    assert run(story()) == ([], [1.0])


def test_an_instance_that_does_not_say_how_it_is_freezes_its_pool() -> None:
    async def story() -> TargetsShown:
        async with TestKit() as kit:
            orchestrator = Orchestrator(kit)
            await orchestrator.set(ComponentName.parse(POOL), PoolTarget(1, ""))
            await kit.start(Silent, instance_id="silent")
            await start(kit, orchestrator, "0:3")
            await eventually(partial(_is_elected, kit), what="it decides")
            await anyio.sleep(120.0)
            return await shown(kit)

    (pool,) = run(story()).pools

    assert (pool.desired, pool.reason) == (2, "frozen: a metric is missing of silent")


@pytest.mark.parametrize(
    ("text", "name", "pool"),
    [
        ("llm.Engine=0:8", "llm.Engine", PoolConfig("aggregated", 0, 8, 1)),
        ("llm.P=1:4:prefill", "llm.P", PoolConfig("prefill", 1, 4, 1)),
        ("llm.D=1:4:decode:2", "llm.D", PoolConfig("decode", 1, 4, 2)),
        ("llm.D=1:4:8", "llm.D", PoolConfig("aggregated", 1, 4, 8)),
    ],
)
def test_a_pool_is_written_on_one_line(text: str, name: str, pool: PoolConfig) -> None:
    assert parse_pool(text) == (ComponentName.parse(name), pool)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pools": ["llm.Engine"]}, "'llm.Engine' is no pool"),
        ({"pools": ["llm.Engine=5:2"]}, "5 to 2 instances"),
        ({"pools": []}, "there is no pool"),
        ({"pools": ["llm.E=0:1", "llm.E=0:2"]}, "there twice"),
        ({"pools": ["llm.E=4:8:2"], "budget": 6}, "budget = 6: the pools have 8 GPUs at least"),
        ({"pools": ["llm.E=0:1"], "command": "scale it"}, "has no {count}"),
        ({"pools": ["llm.E=0:1"], "command": "scale 'it {count}"}, "cannot be read"),
        ({"pools": ["llm.E=0:1"], "webhook_secret": __file__}, "webhook_secret is for webhook"),
    ],
)
def test_an_autoscaler_that_cannot_be_is_refused(options: dict[str, Any], reason: str) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Autoscaler, **options)

    with pytest.raises(ConfigError, match=reason):
        run(story())


def test_engines_tell_how_many_requests_they_had_and_how_long_these_took() -> None:
    async def story() -> tuple[PoolState, PoolState]:
        async with TestKit() as kit:
            await kit.start(MockWorker, speedup_ratio=0.1)
            survey = PoolSurvey(await kit.runtime(), [ComponentName.parse(POOL)])
            await survey.begin()
            before = await survey.observe()
            await asyncio.gather(*(tokens(kit, 50) for _ in range(3)))
            # Engines look at themselves twice a second.
            await anyio.sleep(1.0)
            after = await survey.observe()
            return before.pools[POOL], after.pools[POOL]

    before, after = run(story())

    assert before == PoolState(1, load=PoolLoad(capacity_tokens=64 * 16_384, slots=256))
    load = after.load
    assert load is not None
    assert (load.arrivals, load.firsts, load.ended, load.running) == (3, 3, 3, 0)
    assert load.output_tokens == 150
    # Their prompts are the same, of which blocks are cached.
    assert 2000 <= load.prompt_tokens <= 6000
    # A step of decoding takes 57.4 ms, and prompts of 2000 tokens half a second.
    assert load.itl == pytest.approx(0.0574, rel=0.3)
    assert load.ttft is not None
    assert 0.4 < load.ttft < 2.0
