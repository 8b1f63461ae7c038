"""What a router adds to the metadata of a call, and what it sees of its items."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import pytest
from tests.story import on_a_kit

from dynbus import (
    Actor,
    ConfigError,
    DynbusError,
    Instance,
    Migrate,
    Route,
    RouteRequest,
    call_options,
    context,
    depends,
    handler,
)
from dynbus.testing import TestKit


class Echo(Actor, namespace="told"):
    """Says which metadata reached it."""

    refuses = False

    @handler(migration_limit=1)
    async def metadata(self) -> dict[str, str]:
        if self.refuses:
            raise Migrate("not here")
        return dict(context().metadata)

    @handler
    async def count(self, limit: int) -> AsyncGenerator[int, None]:
        for number in range(limit):
            yield number


class Relay(Actor, namespace="told"):
    echo = depends(Echo)

    @handler
    async def metadata(self) -> dict[str, str]:
        return await self.echo.metadata()


class Adding:
    """Picks the first instance by id, and adds the next of `added` for each attempt."""

    def __init__(self, *added: Any) -> None:
        self._added = list(added)

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Route:
        chosen = min(instance.id for instance in instances)
        return Route(chosen, metadata=self._added.pop(0) if self._added else {})


async def reached(kit: TestKit, router: Adding) -> Mapping[str, str]:
    return await kit.client(Echo, routing=router).metadata()


def test_what_a_router_adds_reaches_the_handler_beside_what_the_caller_gave() -> None:
    async def story(kit: TestKit) -> list[Mapping[str, str]]:
        await kit.start(Echo)
        router = Adding({"rank": "1", "tenant": "of the router, %,="})
        with call_options(metadata={"tenant": "a", "colour": "red"}):
            return [await reached(kit, router), await reached(kit, router)]

    first, second = on_a_kit(story)

    assert first == {"tenant": "of the router, %,=", "colour": "red", "rank": "1"}
    assert second == {"tenant": "a", "colour": "red"}


def test_a_router_may_be_shown_something_else_than_is_sent() -> None:
    shown: list[Any] = []

    class Looking(Adding):
        async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Route:
            shown.append(request.request)
            return await super().route(request, instances)

    async def story(kit: TestKit) -> list[Any]:
        await kit.start(Echo)
        client = await kit.caller.endpoint("told.Echo.count").client(routing=Looking())
        return [item async for item in client.generate(2, routed_as=[1, 2, 3])]

    assert on_a_kit(story) == [0, 1]
    assert shown == [[1, 2, 3]]


def test_a_later_attempt_does_not_keep_what_was_added_for_an_earlier_one() -> None:
    async def story(kit: TestKit) -> Mapping[str, str]:
        refusing = (await kit.start(Echo, instance_id="a")).actor
        assert isinstance(refusing, Echo)
        refusing.refuses = True
        await kit.start(Echo, instance_id="b")
        return await reached(kit, Adding({"rank": "1"}, {"other": "2"}))

    assert on_a_kit(story) == {"other": "2"}


def test_sub_calls_carry_on_what_a_router_added() -> None:
    async def story(kit: TestKit) -> Mapping[str, str]:
        await kit.start(Echo)
        await kit.start(Relay)
        return await kit.client(Relay, routing=Adding({"rank": "1"})).metadata()

    assert on_a_kit(story) == {"rank": "1"}


@pytest.mark.parametrize(
    ("added", "why"),
    [
        ({"rank": 1}, "'rank'=1: keys and values must be strings"),
        ([("rank", "1")], "give a dict of strings"),
        ({str(number): "" for number in range(33)}, "33 keys"),
        ({"rank": "\ud800"}, "no text"),
    ],
)
def test_metadata_that_a_call_cannot_carry_is_refused_with_the_routers_name(
    added: Any, why: str
) -> None:
    async def story(kit: TestKit) -> None:
        await kit.start(Echo)
        with pytest.raises(ConfigError, match="router Adding gave metadata") as refused:
            await reached(kit, Adding(added))
        assert why in str(refused.value)

    on_a_kit(story)


class Seeing:
    """Sees items until it has seen `enough` batches."""

    def __init__(self, enough: int) -> None:
        self.seen: list[bytes] = []
        self.events: list[str] = []
        self._enough = enough

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Route:
        return Route(instances[0].id, self)

    def started(self) -> None:
        self.events.append("started")

    def first_item(self) -> None:
        self.events.append("first item")

    def arrived(self, items: Sequence[bytes]) -> bool:
        self.events.append("arrived")
        self.seen += items
        return self.events.count("arrived") < self._enough

    def ended(self, error: DynbusError | None) -> None:
        self.events.append("ended")


async def count(kit: TestKit, router: Any, limit: int) -> list[int]:
    return [number async for number in kit.client(Echo, routing=router).count(limit)]


def test_an_observer_sees_every_item_as_it_came_after_the_first_was_told() -> None:
    async def story(kit: TestKit) -> Seeing:
        await kit.start(Echo)
        router = Seeing(enough=1 << 30)
        assert await count(kit, router, 2000) == list(range(2000))
        return router

    router = on_a_kit(story)

    assert router.seen == [str(number).encode() for number in range(2000)]
    assert router.events[:3] == ["started", "first item", "arrived"]
    assert router.events[-1] == "ended"


def test_an_observer_that_has_seen_enough_sees_no_more_and_the_reader_gets_all() -> None:
    async def story(kit: TestKit) -> Seeing:
        await kit.start(Echo)
        router = Seeing(enough=1)
        assert await count(kit, router, 2000) == list(range(2000))
        return router

    router = on_a_kit(story)

    assert router.events == ["started", "first item", "arrived", "ended"]
    assert router.seen[0] == b"0"


def test_an_observer_sees_a_unary_result() -> None:
    async def story(kit: TestKit) -> Seeing:
        await kit.start(Echo)
        router = Seeing(enough=1)
        assert await kit.client(Echo, routing=router).metadata() == {}
        return router

    assert on_a_kit(story).seen == [b"{}"]


def test_an_observer_that_raises_at_an_item_harms_nothing_and_sees_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Seeing):
        def arrived(self, items: Sequence[bytes]) -> bool:
            super().arrived(items)
            raise ValueError("cannot see")

    async def story(kit: TestKit) -> Seeing:
        await kit.start(Echo)
        router = Failing(enough=9)
        assert await count(kit, router, 2000) == list(range(2000))
        return router

    assert on_a_kit(story).events == ["started", "first item", "arrived", "ended"]
    assert "arrived of a router raised" in caplog.text
