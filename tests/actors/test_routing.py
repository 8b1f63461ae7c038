"""Each routing policy picks as its name says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dynbus import ConfigError, Load, Router, RouteRequest
from dynbus.actors.calling.routing import (
    POLICIES,
    LeastLoaded,
    PowerOfTwo,
    Random,
    RoundRobin,
    make_router,
)
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.wire import InstanceRecord
from dynbus.bus.records.instance_view import Instance

pytestmark = pytest.mark.anyio

ENDPOINT = EndpointName("demo", "Splitter", "split")


def instance(instance_id: str) -> Instance:
    record = InstanceRecord(
        namespace="demo",
        component="Splitter",
        instance_id=instance_id,
        incarnation="i",
        endpoints={"split": "stream"},
        started=0.0,
    )
    return Instance(record, 0.0)


THREE = [instance("a"), instance("b"), instance("c")]


def request(loads: Mapping[str, int] | None = None) -> RouteRequest:
    def load(instance_id: str) -> Load:
        return Load((loads or {}).get(instance_id, 0), 0)

    return RouteRequest(ENDPOINT, None, None, load)


Policy = RoundRobin | Random | LeastLoaded | PowerOfTwo


async def picks(router: Policy, times: int, loads: Mapping[str, int] | None = None) -> Counter[str]:
    return Counter([await router.route(request(loads), THREE) for _ in range(times)])


async def test_round_robin_gives_each_the_same() -> None:
    assert await picks(RoundRobin(), 30) == {"a": 10, "b": 10, "c": 10}


async def test_round_robin_never_picks_the_same_twice_in_a_row() -> None:
    router = RoundRobin()

    picked = [await router.route(request(), THREE) for _ in range(30)]

    assert all(one != other for one, other in zip(picked, picked[1:], strict=False))


async def test_random_reaches_every_instance() -> None:
    assert set(await picks(Random(), 1000)) == {"a", "b", "c"}


async def test_least_loaded_picks_the_one_with_the_fewest_calls() -> None:
    assert await picks(LeastLoaded(), 20, {"a": 3, "b": 1, "c": 2}) == {"b": 20}


async def test_least_loaded_breaks_ties_at_random() -> None:
    assert set(await picks(LeastLoaded(), 1000, {"a": 1})) == {"b", "c"}


async def test_power_of_two_never_picks_the_most_loaded() -> None:
    assert set(await picks(PowerOfTwo(), 1000, {"a": 3, "b": 1, "c": 2})) == {"b", "c"}


async def test_power_of_two_takes_the_only_one() -> None:
    assert await PowerOfTwo().route(request(), THREE[:1]) == "a"


def test_the_load_is_the_larger_of_what_is_known() -> None:
    assert Load(in_flight=3, reported=1).total == 3
    assert Load(in_flight=0, reported=7).total == 7


@pytest.mark.parametrize(("name", "kind"), list(POLICIES.items()))
def test_a_policy_has_a_name(name: Any, kind: type[Router]) -> None:
    assert type(make_router(name)) is kind


def test_round_robin_is_the_default() -> None:
    assert isinstance(make_router(None), RoundRobin)


def test_a_router_of_one_s_own_is_taken_as_it_is() -> None:
    class Last:
        async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> str:
            return instances[-1].id

    router = Last()

    assert make_router(router) is router


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    unknown: Any = "fastest"

    with pytest.raises(ConfigError) as caught:
        make_router(unknown)

    assert str(caught.value) == (
        "routing 'fastest' is unknown: use one of round_robin, random, least_loaded, power_of_two"
    )


def test_an_object_that_is_no_router_is_refused() -> None:
    no_router: Any = 3

    with pytest.raises(ConfigError) as caught:
        make_router(no_router)

    assert str(caught.value) == ("routing 3 has no method `async def route(request, instances)`")


def test_a_router_class_in_place_of_an_object_is_refused() -> None:
    a_class: Any = LeastLoaded

    with pytest.raises(ConfigError) as caught:
        make_router(a_class)

    assert str(caught.value) == "routing LeastLoaded is a class: give an object, LeastLoaded()"
