"""Each routing policy picks as its name says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus import ConfigError, Load, Router, RouteRequest
from dynbus.actors.calling.routing import (
    POLICIES,
    LeastLoaded,
    LocalFirst,
    PowerOfTwo,
    Random,
    RoundRobin,
    make_router,
)
from dynbus.bus.config import ROUTINGS
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.wire import InstanceRecord
from dynbus.bus.records.instance_view import Instance

pytestmark = pytest.mark.anyio

ENDPOINT = EndpointName("demo", "Splitter", "split")


def instance(instance_id: str, near: bool = False, limit: int | None = None) -> Instance:
    record = InstanceRecord(
        namespace="demo",
        component="Splitter",
        instance_id=instance_id,
        incarnation="i",
        endpoints={"split": "stream"},
        started=0.0,
        limits={} if limit is None else {"split": limit},
    )
    return Instance(record, 0.0, near)


THREE = [instance("a"), instance("b"), instance("c")]


def request(loads: Mapping[str, int] | None = None) -> RouteRequest:
    def load(instance_id: str) -> Load:
        return Load((loads or {}).get(instance_id, 0), 0)

    return RouteRequest(ENDPOINT, None, None, load)


Policy = RoundRobin | Random | LeastLoaded | PowerOfTwo | LocalFirst


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


NEAR_AND_FAR = [instance("n1", True, 2), instance("n2", True, 2), instance("f1", False, 2)]


@pytest.mark.parametrize(
    ("loads", "picked"),
    [
        ({}, {"n1", "n2"}),
        ({"n1": 2}, {"n2"}),
        ({"n1": 1, "n2": 2}, {"n1"}),
        ({"n1": 2, "n2": 2}, {"f1"}),
        # To wait there is no better than to wait here.
        ({"n1": 2, "n2": 2, "f1": 2}, {"n1", "n2"}),
    ],
)
async def test_local_first_picks_in_the_own_zone_until_that_is_full(
    loads: Mapping[str, int], picked: set[str]
) -> None:
    router = LocalFirst(RoundRobin())

    assert {await router.route(request(loads), NEAR_AND_FAR) for _ in range(20)} == picked


async def test_local_first_without_anybody_in_the_own_zone_takes_any() -> None:
    assert set(await picks(LocalFirst(RoundRobin()), 20)) == {"a", "b", "c"}


@given(
    st.lists(
        st.tuples(st.booleans(), st.none() | st.integers(1, 4), st.integers(0, 6)),
        min_size=1,
        max_size=6,
    )
)
def test_local_first_leaves_the_zone_only_for_one_with_room_when_none_here_has_any(
    known: list[tuple[bool, int | None, int]],
) -> None:
    instances = [instance(str(at), near, limit) for at, (near, limit, _) in enumerate(known)]
    has_room = {str(at): limit is None or load < limit for at, (_, limit, load) in enumerate(known)}

    picked = LocalFirst().pick(instances, lambda one: Load(known[int(one)][2], 0), "split")

    rooms_here = [has_room[one.id] for one in instances if one.near]
    if any(rooms_here):
        assert picked.near
        assert has_room[picked.id]
    elif rooms_here and not picked.near:
        assert has_room[picked.id]
    elif rooms_here:
        assert not any(has_room[one.id] for one in instances if not one.near)


def test_local_first_picks_within_a_zone_as_it_is_told() -> None:
    router = make_router("local_first", within="least_loaded")
    assert isinstance(router, LocalFirst)

    picked = {
        router.pick(NEAR_AND_FAR, lambda one: Load(int(one == "n1"), 0), "split").id
        for _ in range(20)
    }

    assert picked == {"n2"}


def test_what_picks_within_a_zone_is_refused_for_other_routings() -> None:
    with pytest.raises(ConfigError) as caught:
        make_router("random", within="least_loaded")

    assert str(caught.value) == (
        "routing 'random' within='least_loaded': give `within` the name of a policy, and to "
        "local_first alone"
    )


def test_the_setting_of_a_process_has_every_policy() -> None:
    assert tuple(POLICIES) == ROUTINGS


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
        "routing 'fastest' is unknown: use one of round_robin, random, least_loaded, power_of_two, "
        "local_first"
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
