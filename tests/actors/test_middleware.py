"""Middleware is done around calls in the order in which it stands, at handlers and at clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from pydantic import BaseModel
from tests.conditions import eventually

from dynbus import (
    Actor,
    Cancelled,
    ConfigError,
    HandlerError,
    InvalidRequest,
    InvalidResponse,
    Middleware,
    MiddlewareCall,
    Overloaded,
    Reply,
    Stream,
    call_options,
    context,
    depends,
    handler,
    with_options,
)
from dynbus.actors.middleware.passing import Proceed
from dynbus.bus.protocol.names import ComponentName
from dynbus.testing import TestKit, run


class Told(Middleware):
    """Tells all that it sees."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name = name
        self.told = told

    async def before(self, call: MiddlewareCall) -> None:
        self.told.append(f"{self.name} before {call.side} {call.kind} {call.endpoint.endpoint}")

    async def around(self, call: MiddlewareCall, proceed: Proceed) -> Any:
        self.told.append(f"{self.name} in")
        try:
            return await proceed()
        finally:
            self.told.append(f"{self.name} out")

    async def items(
        self, call: MiddlewareCall, items: AsyncIterator[Any]
    ) -> AsyncGenerator[Any, None]:
        try:
            async for item in items:
                self.told.append(f"{self.name} item {item}")
                yield item
        finally:
            self.told.append(f"{self.name} closed")


class Number(BaseModel):
    value: int = 0


class Counter(Actor, namespace="middle"):
    def __init__(self) -> None:
        self.told: list[str] = []
        self.middleware = (Told("a", self.told), Told("b", self.told))
        self.tried = 0

    @handler
    async def double(self, number: int) -> int:
        self.told.append("handler")
        return 2 * number

    @handler
    async def none(self) -> str:
        return context().metadata.get("added", "nothing")

    @handler
    async def count(self, to: int) -> AsyncGenerator[int, None]:
        try:
            for number in range(to):
                yield number
        finally:
            self.told.append("handler closed")

    @handler(batch=8)
    async def squares(self, numbers: list[int]) -> list[int]:
        self.told.append(f"a batch of {len(numbers)}")
        return [each * each for each in numbers]

    @handler(durable=True, backoff=0.1)
    async def work(self, number: int) -> int:
        self.tried += 1
        if self.tried == 1:
            raise ValueError("not yet")
        return number + 1


class Plain(Actor, namespace="middle"):
    @handler
    async def echo(self, number: Number) -> Number:
        return number

    @handler
    async def metadata(self) -> dict[str, str]:
        return dict(context().metadata)

    @handler
    async def count(self, to: int) -> AsyncGenerator[int, None]:
        for number in range(to):
            yield number

    @handler(durable=True)
    async def work(self, number: int) -> int:
        return number + 1


def told_of(kit: TestKit) -> list[str]:
    (counter,) = (each.actor for each in kit.started.values() if isinstance(each.actor, Counter))
    return counter.told


def test_the_first_is_outermost_at_a_handler() -> None:
    async def story() -> list[str]:
        async with TestKit() as kit:
            await kit.start(Counter)
            assert await kit.client(Counter).double(4) == 8
            return told_of(kit)

    assert run(story()) == [
        "a before handler unary double",
        "a in",
        "b before handler unary double",
        "b in",
        "handler",
        "b out",
        "a out",
    ]


async def spell(word: str) -> AsyncGenerator[str, None]:
    for letter in word:
        yield letter


async def shout(word: str) -> str:
    return word.upper()


def test_functions_without_a_class_and_those_beside_one_pass_too() -> None:
    told: list[str] = []

    class Behind(Plain, namespace="middle"):
        middleware = (Told("actor", told),)

    async def story() -> None:
        async with TestKit() as kit:
            functions = {"shout": shout, "spell": spell}
            alone = Told("alone", told)
            serving = kit.caller.serve_endpoints("middle", "Alone", functions, middleware=(alone,))
            async with serving:
                endpoint = await kit.caller.endpoint("middle.Alone.shout").client()
                assert await endpoint.round_robin("a") == "A"
                endpoint = await kit.caller.endpoint("middle.Alone.spell").client()
                assert [letter async for letter in endpoint.round_robin("ab")] == ["a", "b"]
            instance = await kit.start(Behind)
            await instance.add_endpoints({"shout": shout})
            await eventually(
                lambda: any(
                    "shout" in one.record.endpoints
                    for one in kit.caller.known_instances(ComponentName("middle", "Behind"))
                )
            )
            endpoint = await kit.caller.endpoint("middle.Behind.shout").client()
            assert await endpoint.round_robin("b") == "B"
            wrong: Any = "audit"
            with pytest.raises(ConfigError, match=r"^serve_endpoints\(middleware=...\)='audit': "):
                async with kit.caller.serve_endpoints("a", "B", functions, middleware=wrong):
                    pass

    run(story())
    assert [line for line in told if "before" in line or "item" in line] == [
        "alone before handler unary shout",
        "alone before handler stream spell",
        "alone item a",
        "alone item b",
        "actor before handler unary shout",
    ]


def test_items_of_a_stream_pass_from_the_inside_out() -> None:
    async def story() -> list[str]:
        async with TestKit() as kit:
            await kit.start(Counter)
            assert [each async for each in kit.client(Counter).count(1)] == [0]
            return told_of(kit)

    assert run(story()) == [
        "a before handler stream count",
        "b before handler stream count",
        "b item 0",
        "a item 0",
        "handler closed",
        "b closed",
        "a closed",
    ]


def test_a_stream_that_is_left_closes_all_that_it_passes() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            instance = await kit.start(Counter)
            told: list[str] = []
            client = with_options(kit.client(Counter), middleware=(Told("c", told),))
            async with aclosing(client.count(10**6)) as numbers:
                assert await anext(numbers) == 0
            assert told[-1] == "c closed"
            await instance.server.execution.idle()
            assert {"handler closed", "a closed", "b closed"} <= set(told_of(kit))

    run(story())


def test_each_call_of_a_batch_passes_by_itself() -> None:
    async def story() -> list[str]:
        async with TestKit() as kit:
            await kit.start(Counter)
            client = kit.client(Counter)
            assert list(await asyncio.gather(*map(client.squares, (2, 3)))) == [4, 9]
            return told_of(kit)

    told = run(story())

    assert told.count("a before handler unary squares") == 2
    assert told.count("a batch of 2") == 1


def test_each_try_of_a_job_passes_at_its_instance() -> None:
    async def story() -> list[str]:
        async with TestKit() as kit:
            await kit.start(Counter)
            assert await kit.client(Counter).work(1) == 2
            return told_of(kit)

    told = run(story())

    assert told.count("a before handler job work") == 2
    assert told.count("a out") == 2


def test_the_same_object_is_for_clients_too_and_sees_a_job_that_is_submitted() -> None:
    told: list[str] = []

    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Plain)
            client = kit.client(Plain, middleware=[Told("c", told)])
            assert await client.echo(Number(value=1)) == Number(value=1)
            assert [each async for each in client.count(1)] == [0]
            assert await client.work(1) == 2
            job = await client.work.submit(2)
            assert await job.result() == 3

    run(story())

    around = ["c in", "c out"]
    assert told == [
        *("c before client unary echo", *around),
        *("c before client stream count", "c item 0", "c closed"),
        *("c before client job work", *around),
        *("c before client submit work", *around),
    ]


def test_dependencies_and_options_add_up_and_the_nearest_is_outermost() -> None:
    told: list[str] = []

    class Caller(Actor, namespace="middle"):
        plain = depends(Plain, middleware=(Told("inner", told),))

        @handler
        async def ask(self, number: int) -> int:
            outer = with_options(self.plain, middleware=(Told("outer", told),))
            return (await outer.echo(Number(value=number))).value

    async def story() -> int:
        async with TestKit() as kit:
            await kit.start(Plain)
            await kit.start(Caller)
            return await kit.client(Caller).ask(3)

    assert run(story()) == 3
    assert [each for each in told if "in" in each.split()[-1]] == ["outer in", "inner in"]


class Changing(Middleware):
    async def before(self, call: MiddlewareCall) -> None:
        call.metadata["added"] = call.side
        if isinstance(call.request, Number):
            call.request = Number(value=call.request.value + 1)


def test_a_request_and_a_client_s_metadata_may_be_changed() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Plain)
            client = kit.client(Plain, middleware=(Changing(),), metadata={"tenant": "a"})
            assert await client.echo(Number(value=1)) == Number(value=2)
            with call_options(metadata={"trace": "x"}):
                found = await client.metadata()
            assert found == {"tenant": "a", "trace": "x", "added": "client"}

    run(story())


def test_what_does_not_fit_is_seen_by_no_middleware_of_a_client() -> None:
    told: list[str] = []

    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Plain)
            client = kit.client(Plain, middleware=(Told("c", told),))
            with pytest.raises(InvalidRequest):
                await client.echo({"value": "x"})  # type: ignore[arg-type]

    run(story())

    assert told == []


def test_what_middleware_makes_of_a_result_must_fit() -> None:
    class Wrong(Middleware):
        async def around(self, call: MiddlewareCall, proceed: Proceed) -> Any:
            return "no number"

    class Wrapped(Plain, namespace="middle"):
        middleware = (Wrong(),)

    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Wrapped)
            with pytest.raises(InvalidResponse):
                await kit.client(Wrapped).echo(Number())

    run(story())


def test_a_client_may_try_again() -> None:
    class Again(Middleware):
        async def around(self, call: MiddlewareCall, proceed: Proceed) -> Any:
            try:
                return await proceed()
            except HandlerError:
                return await proceed()

    class Flaky(Actor, namespace="middle"):
        calls = 0

        @handler
        async def once(self, number: int) -> int:
            self.calls += 1
            if self.calls == 1:
                raise ValueError("not yet")
            return number

    async def story() -> int:
        async with TestKit() as kit:
            await kit.start(Flaky)
            return await kit.client(Flaky, middleware=(Again(),)).once(5)

    assert run(story()) == 5


class Limit(Middleware):
    async def before(self, call: MiddlewareCall) -> None:
        raise Overloaded("too many", retry_after=2.5)


def test_an_error_of_middleware_ends_the_call_with_it() -> None:
    class Limited(Plain, namespace="middle"):
        middleware = (Limit(),)

    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Limited)
            client = kit.client(Limited)
            with call_options(retries=0), pytest.raises(Overloaded) as raised:
                await client.echo(Number())
            assert raised.value.retry_after == 2.5
            with pytest.raises(Overloaded):
                await anext(client.count(3))

    run(story())


def test_a_cancelled_call_reaches_middleware_as_a_cancellation() -> None:
    seen: list[type[BaseException]] = []

    class Watching(Middleware):
        async def around(self, call: MiddlewareCall, proceed: Proceed) -> Any:
            try:
                return await proceed()
            except BaseException as error:
                seen.append(type(error))
                raise

    class Slow(Actor, namespace="middle"):
        middleware = (Watching(),)

        @handler
        async def wait(self) -> None:
            await asyncio.sleep(3600)

    async def story() -> None:
        async with TestKit() as kit:
            instance = await kit.start(Slow)
            call = asyncio.ensure_future(kit.client(Slow, timeout=None).wait())
            await eventually(lambda: instance.server.execution.load == 1)
            (served,) = instance.server.ledger.calls()
            instance.server.execution.cancel(served, 0.0)
            with pytest.raises(Cancelled):
                await call
            await instance.server.execution.idle()

    run(story())

    assert seen == [asyncio.CancelledError]


def test_middleware_that_does_nothing_for_a_kind_of_call_costs_it_nothing() -> None:
    class Results(Middleware):
        async def around(self, call: MiddlewareCall, proceed: Proceed) -> Any:
            return await proceed()

    class Both(Plain, namespace="middle"):
        middleware = (Results(),)

    async def story() -> None:
        async with TestKit() as kit:
            instance = await kit.start(Both)
            plain = await kit.start(Plain)
            both = {
                name: (instance.server.served[name].invoke, plain.server.served[name].invoke)
                for name in ("count", "echo")
            }
            assert [len({type(one) for one in pair}) for pair in both.values()] == [1, 2]
            client = kit.client(Both, middleware=(Results(),))
            assert isinstance(client.count(1), Stream)

    run(story())


def test_a_handler_with_a_reply_has_before_and_refuses_items() -> None:
    class Replying(Actor, namespace="middle"):
        def __init__(self, told: bool = False) -> None:
            self.middleware = (Told("a", []),) if told else (Changing(),)

        @handler
        async def count(self, to: int, reply: Reply[int]) -> None:
            for number in range(to):
                reply.push(number)

    async def story() -> list[int]:
        async with TestKit() as kit:
            with pytest.raises(ConfigError, match=r"sends its items by a reply, and Told\.items"):
                await kit.start(Replying, told=True)
            await kit.start(Replying)
            return [each async for each in kit.client(Replying).count(2)]

    assert run(story()) == [0, 1]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (Told, "give a tuple of objects of Middleware"),
        ((Told,), r"Told is a class: give an object, Told\(\)"),
        ((3,), "has 3, which is no Middleware: subclass it"),
    ],
)
def test_what_is_no_middleware_is_refused_where_it_is_given(given: Any, told: str) -> None:
    class Wrong(Plain, namespace="middle"):
        middleware = given

    async def story() -> None:
        async with TestKit() as kit:
            with pytest.raises(ConfigError, match=told):
                await kit.start(Wrong)
            with pytest.raises(ConfigError, match=told):
                kit.client(Plain, middleware=given)
            with pytest.raises(ConfigError, match=told):
                depends(Plain, middleware=given)

    run(story())


def test_blocks_of_options_and_untyped_clients_take_none() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            with pytest.raises(ConfigError, match=r"with_options\(client, middleware=\.\.\.\)"):
                call_options(middleware=(Limit(),))
            endpoint = kit.caller.endpoint("middle.Plain.echo")
            with pytest.raises(ConfigError, match="an untyped client passes no middleware"):
                await endpoint.client(middleware=(Limit(),))

    run(story())
