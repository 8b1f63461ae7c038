"""Options as values: of a client, a dependency or a call, and who goes before whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any

import pytest
from pydantic import BaseModel
from tests.story import on_a_kit

from dynbus import (
    Actor,
    ConfigError,
    DeadlineExceeded,
    NoInstances,
    call_options,
    context,
    depends,
    handler,
    with_options,
)
from dynbus.actors.calling.options import CallOptions, current_options
from dynbus.bus.clock import monotonic
from dynbus.testing import TestKit


class Seen(BaseModel):
    """What a handler sees of its call."""

    request_id: str
    metadata: dict[str, str]
    priority: int
    idempotency_key: str
    time_left: float | None
    instance_id: str


class Mirror(Actor, namespace="options"):
    @handler
    async def look(self) -> Seen:
        call = context()
        return Seen(
            request_id=call.id,
            metadata=dict(call.metadata),
            priority=call.priority,
            idempotency_key=call.idempotency_key,
            time_left=call.time_left(),
            instance_id=self.instance_id,
        )

    @handler
    async def looks(self, times: int) -> AsyncGenerator[Seen, None]:
        for _ in range(times):
            yield await self.look()


class Caller(Actor, namespace="options"):
    mirror = depends(Mirror, timeout=7.0, retries=1, priority=3, metadata={"by": "depends"})

    @handler
    async def look(self) -> Seen:
        return await self.mirror.look()

    @handler
    async def looks(self, tenants: list[str]) -> AsyncGenerator[Seen, None]:
        for tenant in tenants:
            with call_options(metadata={"tenant": tenant}):
                yield await self.mirror.look()

    @handler
    async def look_with(self, tenant: str) -> Seen:
        return await with_options(self.mirror, metadata={"tenant": tenant}).look()


class Hanging(Actor, namespace="options"):
    @handler
    async def hang(self) -> None:
        await asyncio.Event().wait()


class Hasty(Actor, namespace="options"):
    hanging = depends(Hanging, timeout=2.0)

    @handler
    async def call(self) -> float:
        begun = monotonic()
        with pytest.raises(DeadlineExceeded):
            await self.hanging.hang()
        return monotonic() - begun


def test_a_client_with_options_makes_its_calls_with_them_and_the_first_client_none() -> None:
    async def story(kit: TestKit) -> tuple[Seen, Seen]:
        await kit.start(Mirror, instance_id="one")
        mirror = kit.client(Mirror)
        tenants = with_options(
            mirror,
            timeout=9.0,
            instance="one",
            request_id="r1",
            priority=5,
            idempotency_key="k1",
            metadata={"tenant": "a"},
        )
        return await tenants.look(), await mirror.look()

    seen, plain = on_a_kit(story)

    assert (seen.request_id, seen.metadata, seen.priority, seen.idempotency_key) == (
        "r1",
        {"tenant": "a"},
        5,
        "k1",
    )
    assert seen.time_left is not None
    assert 0 < seen.time_left <= 9.0
    assert (plain.metadata, plain.priority, plain.idempotency_key) == ({}, 0, "")


def test_a_client_with_options_is_of_the_same_class_and_has_the_same_routing() -> None:
    async def story(kit: TestKit) -> tuple[bool, list[str]]:
        for name in ("a", "b"):
            await kit.start(Mirror, instance_id=name)
        mirror = kit.client(Mirror)
        other = with_options(mirror, priority=1)
        ids = [(await one.look()).instance_id for one in (mirror, other, mirror, other)]
        return type(other) is type(mirror), ids

    same, ids = on_a_kit(story)

    assert same
    assert ids in (["a", "b", "a", "b"], ["b", "a", "b", "a"])


def test_an_untyped_client_takes_options_too() -> None:
    async def story(kit: TestKit) -> list[Any]:
        for name in ("a", "b"):
            await kit.start(Mirror, instance_id=name)
        client = await kit.caller.endpoint("options.Mirror.look").client(metadata={"by": "client"})
        other = with_options(client, metadata={"tenant": "a"}, instance="a")
        return [
            await client.generate(),
            await other.generate(),
            await other.direct(None, "b"),
            await other.round_robin(),
        ]

    plain, first, direct, turn = on_a_kit(story)

    assert dict(plain["metadata"]) == {"by": "client"}
    assert dict(first["metadata"]) == {"by": "client", "tenant": "a"}
    assert (first["instance_id"], direct["instance_id"], turn["instance_id"]) == ("a", "b", "a")


def test_options_of_options_change_some_and_metadata_adds_up() -> None:
    async def story(kit: TestKit) -> Seen:
        await kit.start(Mirror)
        first = kit.client(Mirror, priority=1, timeout=50.0, metadata={"a": "1", "b": "1"})
        second = with_options(first, priority=2, metadata={"b": "2"})
        return await with_options(second, metadata={"c": "3"}).look()

    seen = on_a_kit(story)

    assert (seen.priority, seen.metadata) == (2, {"a": "1", "b": "2", "c": "3"})
    assert seen.time_left is not None
    assert 40.0 < seen.time_left <= 50.0


def test_the_block_goes_before_the_client_and_the_client_before_the_handler() -> None:
    async def story(kit: TestKit) -> tuple[Seen, Seen, Seen]:
        await kit.start(Mirror)
        mirror = kit.client(Mirror, timeout=50.0, priority=1, metadata={"a": "client"})
        by_client = await mirror.look()
        with call_options(timeout=5.0, priority=0, metadata={"a": "block"}):
            by_block = await mirror.look()
        with call_options(timeout=None):
            unlimited = await mirror.look()
        return by_client, by_block, unlimited

    by_client, by_block, unlimited = on_a_kit(story)

    assert by_client.time_left is not None
    assert by_block.time_left is not None
    assert (by_client.time_left > 5.0, by_client.priority) == (True, 1)
    assert (by_block.time_left <= 5.0, by_block.priority) == (True, 0)
    assert by_block.metadata == {"a": "block"}
    # What the handler declares still holds.
    assert unlimited.time_left is not None
    assert (unlimited.time_left > 50.0, unlimited.priority) == (True, 1)


def test_a_block_that_waits_for_nothing_goes_before_a_client_that_waits() -> None:
    async def story(kit: TestKit) -> float:
        mirror = kit.client(Mirror, wait=30.0)
        begun = monotonic()
        with pytest.raises(NoInstances), call_options(wait=0.0):
            await mirror.look()
        return monotonic() - begun

    assert on_a_kit(story) < 1.0


def test_a_client_waits_for_its_first_instance() -> None:
    async def story(kit: TestKit) -> Seen:
        waiting = asyncio.ensure_future(kit.client(Mirror, wait=30.0).look())
        await asyncio.sleep(5.0)
        await kit.start(Mirror)
        return await waiting

    assert on_a_kit(story).metadata == {}


def test_a_dependency_has_its_options_in_every_call() -> None:
    async def story(kit: TestKit) -> tuple[Seen, Seen]:
        await kit.start(Mirror)
        await kit.start(Caller)
        caller = kit.client(Caller, metadata={"from": "outside"})
        return await caller.look(), await caller.look_with("a")

    seen, with_tenant = on_a_kit(story)

    assert (seen.metadata, seen.priority) == ({"from": "outside", "by": "depends"}, 3)
    assert seen.time_left is not None
    assert seen.time_left <= 7.0
    assert with_tenant.metadata == {"from": "outside", "by": "depends", "tenant": "a"}


def test_the_timeout_of_a_dependency_ends_its_calls() -> None:
    async def story(kit: TestKit) -> float:
        await kit.start(Hanging)
        await kit.start(Hasty)
        return await kit.client(Hasty).call()

    assert on_a_kit(story) == pytest.approx(2.0, abs=0.2)


def test_options_around_the_yield_of_a_handler_stay_with_that_call() -> None:
    async def story(kit: TestKit) -> tuple[list[str], list[str]]:
        await kit.start(Mirror)
        await kit.start(Caller)
        caller = kit.client(Caller)

        async def tenants(*names: str) -> list[str]:
            found: list[str] = []
            async with aclosing(caller.looks(list(names))) as seen:
                async for one in seen:
                    found.append(one.metadata["tenant"])
                    await asyncio.sleep(0.1)
            return found

        one, other = await asyncio.gather(tenants("a", "b", "a"), tenants("c", "c", "d"))
        return one, other

    assert on_a_kit(story) == (["a", "b", "a"], ["c", "c", "d"])


def test_interleaved_generators_each_call_for_their_own_tenant() -> None:
    async def events(mirror: Mirror, tenant: str) -> AsyncGenerator[str, None]:
        client = with_options(mirror, metadata={"tenant": tenant})
        async for seen in client.looks(3):
            yield seen.metadata["tenant"]
            yield (await client.look()).metadata["tenant"]

    async def story(kit: TestKit) -> list[str]:
        await kit.start(Mirror)
        mirror = kit.client(Mirror)
        first, second = events(mirror, "a"), events(mirror, "b")
        return [await anext(one) for _ in range(4) for one in (first, second)]

    assert on_a_kit(story) == ["a", "b"] * 4


async def opening() -> AsyncGenerator[CallOptions, None]:
    with call_options(metadata={"tenant": "a"}):
        yield current_options()


@contextmanager
def tenant(name: str) -> Generator[None]:
    with call_options(metadata={"tenant": name}):
        yield


async def opening_by_its_own_manager() -> AsyncIterator[None]:
    with tenant("a"):
        yield


async def opening_before_it_yields() -> AsyncIterator[CallOptions]:
    with call_options(timeout=1.0):
        inside = current_options()
    yield inside


@pytest.mark.anyio
@pytest.mark.parametrize(
    "generator", [opening, opening_by_its_own_manager, opening_before_it_yields]
)
async def test_options_in_a_generator_that_is_no_handler_are_refused(generator: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        await anext(generator())

    assert str(caught.value) == (
        f"{generator.__name__} is a generator and opens call_options, which would hold for "
        "whatever runs while it waits in a yield, other callers' calls too; give them to a client "
        "instead, as in with_options(client, timeout=2.0)"
    )
    assert current_options() == CallOptions()


def test_a_manager_of_one_s_own_may_set_options_for_a_block() -> None:
    with tenant("a"):
        inside = current_options()

    assert inside.get("metadata") == {"tenant": "a"}
    assert current_options() == CallOptions()


@pytest.mark.anyio
async def test_options_that_are_left_in_another_task_are_an_error_that_says_what_to_do() -> None:
    stack = ExitStack()

    async def enter() -> None:
        stack.enter_context(call_options(timeout=1.0))

    await asyncio.create_task(enter())

    with pytest.raises(ConfigError, match=r"entered in one task .* with_options\(client"):
        stack.close()


def test_a_block_is_entered_once() -> None:
    options = call_options(timeout=1.0)

    with options, pytest.raises(ConfigError, match="in force already"):
        options.__enter__()

    assert current_options() == CallOptions()


def test_bad_options_are_refused_before_the_block_is_entered() -> None:
    with pytest.raises(ConfigError, match="wait=-1 must be 0 or more seconds"):
        call_options(wait=-1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"time_out": 1.0},
            "depends(Mirror) has no option 'time_out'; its options are timeout, wait, priority, "
            "retries, metadata, middleware, spill",
        ),
        (
            {"request_id": "r1"},
            "depends(Mirror) has no option 'request_id': give it with with_options(client, ...); "
            "its options are timeout, wait, priority, retries, metadata, middleware, spill",
        ),
        ({"wait": "long"}, "wait='long' must be 0 or more seconds"),
        ({"metadata": "tenant"}, "metadata='tenant' must be a mapping of strings to strings"),
        ({"retries": -1}, "retries=-1 must be a whole number, 0 or more"),
    ],
)
def test_a_bad_option_of_a_dependency_is_refused_where_it_is_declared(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        depends(Mirror, **options)

    assert str(caught.value) == text


def test_a_bad_option_of_a_client_is_refused_at_once() -> None:
    async def story(kit: TestKit) -> list[str]:
        bad: dict[str, Any] = {"timeout": "1s"}
        with pytest.raises(ConfigError) as by_client:
            kit.client(Mirror, **bad)
        with pytest.raises(ConfigError) as by_value:
            with_options(kit.client(Mirror), **bad)
        return [str(by_client.value), str(by_value.value)]

    told = "timeout='1s' must be more than 0 and at most 1e+09 seconds, or None for no limit"
    assert on_a_kit(story) == [told, told]


@pytest.mark.parametrize("given", [Caller(), Caller.mirror, Mirror, None])
def test_only_a_client_takes_options(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"with_options\(.*\): give a client"):
        with_options(given, timeout=1.0)


def test_metadata_that_is_changed_later_does_not_change_the_client() -> None:
    async def story(kit: TestKit) -> Seen:
        await kit.start(Mirror)
        metadata = {"tenant": "a"}
        mirror = with_options(kit.client(Mirror), metadata=metadata)
        metadata["tenant"] = "b"
        return await mirror.look()

    assert on_a_kit(story).metadata == {"tenant": "a"}


def test_metadata_of_block_and_client_together_is_bounded() -> None:
    async def story(kit: TestKit) -> None:
        mirror = kit.client(Mirror, metadata={"a": "x" * 5000})
        with call_options(metadata={"b": "x" * 5000}):
            await mirror.look()

    with pytest.raises(ConfigError, match="10002 characters"):
        on_a_kit(story)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"timout": 3},
            "with_options(client, ...) has no option 'timout' (did you mean timeout?); its "
            "options are timeout, wait, priority, retries, metadata, middleware, spill, instance, "
            "request_id, idempotency_key",
        ),
        (
            {"instance": ""},
            "instance '' is not a valid name: use 1 to 63 letters, digits, '_' or '-', beginning "
            "with a letter or a digit",
        ),
    ],
)
def test_an_option_of_a_client_that_makes_no_sense_is_refused_at_once(
    options: dict[str, Any], text: str
) -> None:
    async def check(kit: TestKit) -> None:
        await kit.start(Mirror)
        with pytest.raises(ConfigError) as caught:
            with_options(kit.client(Mirror), **options)

        assert str(caught.value) == text

    on_a_kit(check)


def test_none_says_nothing_as_an_option_of_a_client() -> None:
    async def check(kit: TestKit) -> None:
        await kit.start(Mirror)
        client = with_options(kit.client(Mirror), priority=3)

        seen = await with_options(client, wait=None, priority=None, instance=None).look()

        assert seen.priority == 3

    on_a_kit(check)
