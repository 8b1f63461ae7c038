"""What a router of a user does wrong is told to the caller, and never sends a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from tests.story import on_a_kit

from dynbus import (
    Actor,
    ConfigError,
    DeadlineExceeded,
    DynbusError,
    Overloaded,
    RouteRequest,
    call_options,
    handler,
)
from dynbus.actors.calling.routing import ROUTE_TIMEOUT
from dynbus.bus.clock import monotonic
from dynbus.bus.records.instance_view import Instance
from dynbus.testing import TestKit


class Worker(Actor, namespace="selection"):
    calls = 0

    @handler(concurrency=1, queue=0)
    async def hold(self) -> None:
        await asyncio.sleep(5.0)

    @handler(timeout=None)
    async def where(self) -> str:
        type(self).calls += 1
        return self.instance_id


Route = Callable[[RouteRequest, Sequence[Instance]], Awaitable[Any]]


class Given:
    """Routes as a function of the test says."""

    def __init__(self, route: Route) -> None:
        self._route = route

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> str:
        return await self._route(request, instances)  # type: ignore[no-any-return]


def picking(chosen: Any) -> Given:
    async def route(request: RouteRequest, instances: Sequence[Instance]) -> Any:
        return chosen

    return Given(route)


def failure(router: Any, kind: type[DynbusError], **options: Any) -> tuple[DynbusError, float]:
    """The error of a call with `router` between instances a and b, and the seconds it took."""

    async def story(kit: TestKit) -> tuple[DynbusError, float]:
        for name in ("a", "b"):
            await kit.start(Worker, instance_id=name)
        begun = monotonic()
        with pytest.raises(kind) as caught, call_options(**options):
            await kit.client(Worker, routing=router).where()
        return caught.value, monotonic() - begun

    before = Worker.calls
    told = on_a_kit(story)
    assert Worker.calls == before
    return told


@pytest.mark.parametrize(
    "chosen", ["c", "a 7\r\nPUB x 0\r\n", "a.b", "*", "", None, 3, ["a"], "x" * 1000]
)
def test_a_router_that_picks_what_it_was_not_offered_is_told_what_it_was(chosen: Any) -> None:
    error, _ = failure(picking(chosen), ConfigError)

    assert str(error).startswith(f"router Given picked {repr(chosen)[:77]}")
    assert str(error).endswith(
        "; it was offered a, b (while choosing an instance for selection.Worker.where)"
    )
    assert len(str(error)) < 200
    assert not error.started


def test_a_router_that_returns_the_instance_is_told_to_return_its_id() -> None:
    async def route(request: RouteRequest, instances: Sequence[Instance]) -> Instance:
        return instances[0]

    error, _ = failure(Given(route), ConfigError)

    assert ": return its `id`; it was offered a, b" in str(error)


def test_an_exception_of_a_router_is_told_with_its_cause() -> None:
    async def route(request: RouteRequest, instances: Sequence[Instance]) -> str:
        raise KeyError("no index")

    error, _ = failure(Given(route), ConfigError)

    assert str(error) == (
        "router Given raised KeyError: 'no index' "
        "(while choosing an instance for selection.Worker.where)"
    )
    assert isinstance(error.__cause__, KeyError)


def test_a_time_out_of_a_router_s_own_is_an_exception_like_any_other() -> None:
    async def route(request: RouteRequest, instances: Sequence[Instance]) -> str:
        raise TimeoutError("the index did not answer")

    error, _ = failure(Given(route), ConfigError, timeout=5.0)

    assert "raised TimeoutError: the index did not answer" in str(error)


def test_a_typed_error_of_a_router_is_the_call_s() -> None:
    async def route(request: RouteRequest, instances: Sequence[Instance]) -> str:
        raise Overloaded("every instance is full", retry_after=3.0, started=False)

    error, _ = failure(Given(route), Overloaded)

    assert isinstance(error, Overloaded)
    assert (error.message, error.retry_after) == ("every instance is full", 3.0)


def test_a_router_that_has_no_room_is_asked_again_as_often_as_the_caller_wants() -> None:
    asked: list[int] = []

    async def route(request: RouteRequest, instances: Sequence[Instance]) -> str:
        asked.append(len(instances))
        raise Overloaded("every instance is full", started=False)

    failure(Given(route), Overloaded, retries=3)

    assert asked == [2, 2, 2, 2]


def test_a_router_that_is_not_asynchronous_is_told_so() -> None:
    class Synchronous:
        def route(self, request: RouteRequest, instances: Sequence[Instance]) -> str:
            return instances[0].id

    error, _ = failure(Synchronous(), ConfigError)

    assert "Synchronous is not asynchronous: write `async def route`" in str(error)


@pytest.mark.parametrize(("timeout", "seconds"), [(2.0, 2.0), (None, ROUTE_TIMEOUT)])
def test_a_router_that_never_picks_ends_the_call_in_time(
    timeout: float | None, seconds: float
) -> None:
    cancelled: list[bool] = []

    async def route(request: RouteRequest, instances: Sequence[Instance]) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)
        return ""

    error, took = failure(Given(route), DeadlineExceeded, timeout=timeout)

    assert str(error) == (
        f"router Given picked no instance for selection.Worker.where within {seconds:.3g} s"
    )
    assert took == pytest.approx(seconds, abs=0.01)
    assert cancelled == [True]


def test_a_router_that_insists_on_an_instance_that_turned_the_call_away_is_told() -> None:
    async def story(kit: TestKit) -> str:
        for name in ("a", "b"):
            await kit.start(Worker, instance_id=name)
        client = kit.client(Worker, routing=picking("a"))
        first = asyncio.ensure_future(client.hold())
        await asyncio.sleep(1.0)
        with pytest.raises(ConfigError) as caught:
            await client.hold()
        await first
        return str(caught.value)

    assert on_a_kit(story).startswith("router Given picked 'a'; it was offered b ")


def test_cancelling_the_call_cancels_its_router() -> None:
    ended: list[bool] = []

    async def route(request: RouteRequest, instances: Sequence[Instance]) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return ""

    async def story(kit: TestKit) -> None:
        await kit.start(Worker, instance_id="a")
        call = asyncio.ensure_future(kit.client(Worker, routing=Given(route)).where())
        await asyncio.sleep(1.0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    on_a_kit(story)

    assert ended == [True]


def test_an_instance_that_goes_while_the_router_thinks_is_passed_over() -> None:
    async def story(kit: TestKit) -> list[str]:
        for name in ("a", "b"):
            await kit.start(Worker, instance_id=name)
        asked: list[list[str]] = []

        async def route(request: RouteRequest, instances: Sequence[Instance]) -> str:
            asked.append([one.id for one in instances])
            if len(asked) == 1:
                await kit.started["a"].stop()
            return asked[-1][0]

        answer = await kit.client(Worker, routing=Given(route)).where()
        return [answer, *asked[-1]]

    assert on_a_kit(story) == ["b", "b"]


def test_a_router_sees_the_request_and_every_instance() -> None:
    seen: list[tuple[Any, ...]] = []

    async def route(request: RouteRequest, instances: Sequence[Instance]) -> str:
        ids = [one.id for one in instances]
        seen.append((str(request.endpoint), request.request, request.load("a").total, ids))
        return "b"

    async def story(kit: TestKit) -> str:
        for name in ("a", "b"):
            await kit.start(Worker, instance_id=name)
        return await kit.client(Worker, routing=Given(route)).where()

    assert on_a_kit(story) == "b"
    assert seen == [("selection.Worker.where", None, 0, ["a", "b"])]
