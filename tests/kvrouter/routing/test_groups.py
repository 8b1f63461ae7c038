"""Routers by group have a part of the instances each, and stand for it before other routers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus import Actor, ActorInstance, NoInstances, handler
from dynbus.kvrouter import KvRouter, PolicyChoice, RouterActor
from dynbus.kvrouter.routing.candidates import Offer
from dynbus.kvrouter.routing.cost import RequestShape
from dynbus.kvrouter.routing.decision import Decision
from dynbus.kvrouter.routing.profiles import Profiles, profile_of_router, read_profile
from dynbus.kvrouter.routing.queue import SchedulingRequest
from dynbus.kvrouter.routing.scheduler import KvScheduler
from dynbus.kvrouter.stream.membership import Group, better_group, free_group
from dynbus.testing import TestKit, run

from .routing_fixtures import until
from .test_profile import instance

REQUEST = {"token_ids": list(range(64))}


@given(st.lists(st.text("abcdef0123456789", min_size=8, max_size=8), unique=True))
def test_each_instance_is_of_one_group(ids: list[str]) -> None:
    assert all(sum(Group(number, 3).has(one) for number in range(3)) == 1 for one in ids)


def test_a_router_begins_with_a_group_that_the_fewest_have() -> None:
    taken = [Group(0, 3), Group(0, 3), Group(2, 3)]

    assert free_group(taken, 3) == Group(1, 3)
    assert [free_group([], 3, turn).number for turn in range(6)] == [0, 1, 2, 0, 1, 2]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_routers_change_until_groups_differ_by_one_at_most_and_then_stay(
    numbers: list[int],
) -> None:
    groups = {f"r{at:02}": Group(number, 4) for at, number in enumerate(numbers)}

    def wishes() -> dict[str, Group]:
        """All of them look at once."""
        seen = dict(groups)
        wished: dict[str, Group] = {}
        for router, own in seen.items():
            others = {one: group for one, group in seen.items() if one != router}
            if (better := better_group(own, router, others)) is not None:
                wished[router] = better
        return wished

    for _ in range(4 * len(numbers)):
        groups.update(wishes())

    routers = Counter(groups.values())
    held = [routers[Group(number, 4)] for number in range(4)]
    assert max(held) - min(held) <= 1
    assert wishes() == {}


def test_a_router_stands_for_all_that_its_instances_have() -> None:
    first = {"kv_block_size": "16", "kv_total_blocks": "100", "kv_loras": "a,b"}
    second = {"kv_block_size": "16", "kv_total_blocks": "50", "kv_dp_size": "2", "kv_tags": "eu"}
    told = [read_profile("a", first), read_profile("b", second)]

    profile = read_profile("router", profile_of_router(told, 16))

    assert (profile.block_size, profile.total_blocks, profile.routes) == (16, 200, 2)
    assert (profile.loras, profile.tags) == (frozenset("ab"), frozenset({"eu"}))
    assert Offer((profile,)).total_blocks == (100,)


def test_a_router_without_instances_gets_no_calls_while_others_have_some() -> None:
    idle = instance("idle", profile_of_router([], None))
    busy = instance("busy", {"kv_block_size": "16", "routes_instances": "3"})
    profiles = Profiles(block_size=16, tokenizer_id="", needs_events=False)

    usable, left_out = profiles.of([idle, busy], 0.0)

    assert [one.instance for one in usable] == ["busy"]
    assert left_out == {"idle": "router idle has no instance to forward to"}
    assert [one.instance for one in profiles.of([idle], 0.0)[0]] == ["idle"]
    unknown = Profiles(block_size=None, tokenizer_id="", needs_events=False)
    with pytest.raises(NoInstances, match="no router has an instance"):
        unknown.of([idle], 0.0)


def prompt(number: int) -> RequestShape:
    return RequestShape.of(list(range(1000 * number, 1000 * number + 64)), 16)


def test_the_load_of_a_router_counts_by_its_instances() -> None:
    small = read_profile("small", {"kv_block_size": "16"})
    large = read_profile("large", {"kv_block_size": "16", "routes_instances": "8"})
    scheduler = KvScheduler()

    went: Counter[str] = Counter()
    for number in range(90):
        asked = SchedulingRequest(f"r{number}", prompt(number), [small, large], 0.0)
        decision = scheduler.submit(asked, 0.0)
        assert isinstance(decision, Decision)
        went[decision.chosen.instance] += 1

    assert went["small"] == pytest.approx(10, abs=2)


class Engine(Actor, namespace="grouped"):
    """Tells its name."""

    def instance_metadata(self) -> Mapping[str, str]:
        return {"kv_block_size": "16", "kv_total_blocks": "100"}

    @handler
    async def generate(self, prompt: dict[str, Any]) -> AsyncGenerator[str, None]:
        yield self.instance_id


class Router(RouterActor, namespace="grouped"):
    """Has one of two groups."""


def router_of(instance: ActorInstance) -> Router:
    assert isinstance(instance.actor, Router)
    return instance.actor


SETTINGS: Mapping[str, Any] = {
    "target": "grouped.Engine.generate",
    "exact": False,
    "groups": 2,
    "policies": ("dynamo",),
}


def test_equal_prompts_go_to_one_engine_by_the_router_of_its_group_and_all_engines_are_used() -> (
    None
):
    async def story() -> None:
        async with TestKit() as kit:
            for number in range(8):
                await kit.start(Engine, instance_id=f"engine-{number}")
            routers = [
                await kit.start(Router, instance_id=f"router-{number}", **SETTINGS)
                for number in range(2)
            ]
            stands_for = [one.actor.instance_metadata() for one in routers]
            assert sum(int(one["routes_instances"]) for one in stands_for) == 8
            assert sum(int(one["kv_total_blocks"]) for one in stands_for) == 800
            before = KvRouter(exact=False)
            front = kit.client(Router, routing=before)
            engines: set[str] = set()
            for number in range(40):
                prompt = {"token_ids": [1000 * number + at for at in range(64)]}
                went: set[str] = set()
                for _ in range(3):
                    went |= {item async for item in front.generate(prompt)}
                assert len(went) == 1
                engines |= went
            assert len(engines) == 8

    run(story())


def test_a_router_whose_group_is_empty_forwards_to_others_and_routers_of_one_group_share_it() -> (
    None
):
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Engine, instance_id="alone")
            routers = [
                await kit.start(Router, instance_id=f"router-{number}", **SETTINGS)
                for number in range(3)
            ]
            clients = [kit.client(Router), kit.client(Router, routing=KvRouter(exact=False))]
            for number in range(20):
                for client in clients:
                    asked = {"token_ids": [1000 * number + at for at in range(64)]}
                    assert [item async for item in client.generate(asked)] == ["alone"]
            for number in range(7):
                await kit.start(Engine, instance_id=f"engine-{number}")
            stands_for = [one.actor.instance_metadata() for one in routers]
            # Two routers of a group stand for half of it each, rounded up.
            assert sum(int(one["routes_instances"]) for one in stands_for) in (8, 9)

    run(story())


def test_calls_wait_for_the_first_instance_of_a_router() -> None:
    async def story() -> list[str]:
        async with TestKit() as kit:
            await kit.start(Router, **SETTINGS)

            async def ask() -> list[str]:
                return [item async for item in kit.client(Router).generate(REQUEST)]

            asking = asyncio.create_task(ask())
            await asyncio.sleep(1.0)
            await kit.start(Engine, instance_id="late")
            return await asking

    assert run(story()) == ["late"]


def test_a_group_whose_only_router_left_is_taken_by_one_of_another() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            for number in range(8):
                await kit.start(Engine, instance_id=f"engine-{number}")
            routers = [
                await kit.start(Router, instance_id=f"router-{number}", **SETTINGS)
                for number in range(3)
            ]

            def groups() -> list[str]:
                return sorted(one.actor.instance_metadata()["routes_group"] for one in routers)

            assert groups() == ["0/2", "0/2", "1/2"]
            alone = next(
                one for one in routers if one.actor.instance_metadata()["routes_group"] == "1/2"
            )
            routers.remove(alone)
            await alone.stop()
            assert groups() == ["0/2", "0/2"]
            for one in routers:
                await router_of(one).use_policy(PolicyChoice(policy="dynamo"))

            await until(lambda: groups() == ["0/2", "1/2"])
            policies = [(await router_of(one).policy()).policy for one in routers]
            assert policies == ["dynamo", "dynamo"]
            client = kit.client(Router)
            engines: set[str] = set()
            for number in range(60):
                prompt = {"token_ids": [1000 * number + at for at in range(64)]}
                engines |= {item async for item in client.generate(prompt)}
            assert len(engines) == 8

    run(story())
