"""Handlers that raise whatever they like: their own call ends in an error, and no other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from tests.conditions import eventually

from dynbus import (
    Actor,
    ConfigError,
    Context,
    DynbusError,
    HandlerError,
    InvalidRequest,
    Overloaded,
    Runtime,
    call_options,
    handler,
)
from dynbus.bus.nats.server_process import RunningServer
from dynbus.testing import TestKit, run


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class Bare(DynbusError):
    code = "Bare"

    def __init__(self) -> None:
        pass


class Fatal(BaseException):
    pass


def misuse(kind: str) -> BaseException:
    odd: Any = [{"type": "missing", "loc": ("a",)}]
    soon: Any = "soon"
    errors: dict[str, BaseException] = {
        "list": InvalidRequest(odd),
        "soon": Overloaded("later", retry_after=soon),
        "nan": Overloaded("later", retry_after=math.nan),
        "no text": NoText(),
        "bare": Bare(),
        "fatal": Fatal("gone"),
        "long": ValueError("é" * 100_000),
        "surrogate": ValueError("\ud800"),
    }
    return errors[kind]


class Wild(Actor, namespace="wild"):
    @handler
    async def go(self, kind: str) -> str:
        if kind == "well":
            return kind
        raise misuse(kind)

    @handler
    async def count(self, upto: int) -> AsyncGenerator[int, None]:
        for number in range(upto):
            await asyncio.sleep(0.01)
            yield number


EXPECTED = {
    "list": "InvalidRequest",
    "soon": "Overloaded",
    "nan": "Overloaded",
    "no text": "HandlerError",
    "bare": "Bare",
    "fatal": "HandlerError",
    "long": "HandlerError",
    "surrogate": "HandlerError",
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_an_odd_error_arrives_and_hurts_nobody_else(kind: str) -> None:
    async def story() -> tuple[str, list[str], list[int]]:
        async with TestKit() as kit:
            await kit.start(Wild)
            wild = kit.client(Wild)

            async def stream() -> list[int]:
                return [number async for number in wild.count(20)]

            beside = asyncio.create_task(stream())
            with call_options(timeout=5.0):
                culprit, *innocent = await asyncio.gather(
                    wild.go(kind), *[wild.go("well") for _ in range(4)], return_exceptions=True
                )
            assert isinstance(culprit, DynbusError)
            return culprit.code, [str(answer) for answer in innocent], await beside

    code, innocent, numbers = run(story())
    assert code == EXPECTED[kind]
    assert innocent == ["well"] * 4
    assert numbers == list(range(20))


@pytest.mark.anyio
async def test_a_long_error_fits_into_the_messages_of_a_small_server(
    own_server: RunningServer,
) -> None:
    async with Runtime.connect(own_server.url) as runtime:
        await runtime.start(Wild)
        with call_options(wait=60.0, timeout=5.0), pytest.raises(HandlerError) as caught:
            await runtime.client(Wild).go("long")

    assert caught.value.message.startswith("ValueError: éé")


def test_two_tasks_cannot_read_one_stream() -> None:
    async def story() -> list[Any]:
        async with TestKit() as kit:
            await kit.start(Wild)
            stream = kit.client(Wild).count(3)
            await anext(stream)
            both = await asyncio.gather(anext(stream), anext(stream), return_exceptions=True)
            return list(both)

    results = run(story())
    assert sorted(type(result).__name__ for result in results) == ["RuntimeError", "int"]


def test_a_request_id_that_is_no_header_is_refused() -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        Context("x\r\nDynbus-Metadata: tenant=root")


def test_one_id_serves_one_component() -> None:
    async def story() -> str:
        async with TestKit() as kit:

            class Other(Actor, namespace="wild"):
                @handler
                async def go(self) -> None: ...

            await kit.start(Wild, instance_id="worker-0")
            with pytest.raises(ConfigError) as caught:
                await kit.start(Other, instance_id="worker-0")
            return str(caught.value)

    assert "in use by wild.Wild" in run(story())


def test_an_instance_whose_id_was_taken_over_stops() -> None:
    async def story() -> tuple[str, list[str]]:
        async with TestKit(lease_ttl=2) as kit:
            first = await kit.start(Wild, instance_id="w0")
            runtime = first.actor.runtime
            for connection in (runtime.bus.data, runtime.bus.lane.connection):
                connection.disconnect()  # type: ignore[attr-defined]
            await asyncio.sleep(4.0)
            second = await kit.start(Wild, instance_id="w0")
            for connection in (runtime.bus.data, runtime.bus.lane.connection):
                connection.reconnect()  # type: ignore[attr-defined]
            await eventually(lambda: first.state.value == "stopped")
            answers = [await kit.client(Wild).go("well") for _ in range(4)]
            assert second.state.value == "ready"
            return first.state.value, answers

    assert run(story()) == ("stopped", ["well"] * 4)
