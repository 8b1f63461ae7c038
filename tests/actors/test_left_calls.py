"""A call that was left before its request was sent is never sent."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.story import on_a_kit

from dynbus import (
    Actor,
    Cancelled,
    DynbusError,
    Instance,
    Route,
    RouteRequest,
    UnknownOutcome,
    call_options,
    handler,
)
from dynbus.actors.calling.clients import Call
from dynbus.bus.calling.pending_call import PendingCall
from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.telemetry.telemetry import Telemetry
from dynbus.testing import TestKit

LONG = 20.0


class Worker(Actor, namespace="left"):
    def __init__(self) -> None:
        self.calls = 0

    @handler
    async def where(self) -> str:
        self.calls += 1
        return self.instance_id

    @handler(idempotent=True)
    async def slow(self) -> str:
        self.calls += 1
        await asyncio.sleep(LONG)
        return self.instance_id

    @handler(concurrency=1, queue=0)
    async def alone(self, seconds: float) -> str:
        self.calls += 1
        await asyncio.sleep(seconds)
        return self.instance_id

    @handler
    async def count(self) -> AsyncGenerator[int, None]:
        self.calls += 1
        for number in range(1000):
            yield number
            await asyncio.sleep(1.0)


WORKER_A = InstanceName(Worker.__dynbus_service__.namespace, Worker.__dynbus_component__, "a")


class Thinking:
    """Picks the first instance once it is told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.told = asyncio.Event()
        self.events: list[str] = []

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Route:
        self.asked.set()
        await self.told.wait()
        return Route(instances[0].id, self)

    def started(self) -> None:
        self.events.append("started")

    def first_item(self) -> None:
        self.events.append("first item")

    def ended(self, error: DynbusError | None) -> None:
        self.events.append("ended well" if error is None else error.code)


async def worker_of(kit: TestKit, instance_id: str = "a") -> Worker:
    instance = await kit.start(Worker, instance_id=instance_id)
    assert isinstance(instance.actor, Worker)
    return instance.actor


async def generate(
    kit: TestKit, endpoint: str, request: Any = None, routing: Thinking | None = None
) -> Call:
    client = await kit.caller.endpoint(f"left.Worker.{endpoint}").client(routing=routing)
    return client.generate(request)


async def untyped(kit: TestKit, router: Thinking) -> tuple[Call, Coroutine[Any, Any, Any]]:
    call = await generate(kit, "where", routing=router)

    async def result() -> Any:
        return await call

    return call, result()


async def untyped_stream(kit: TestKit, router: Thinking) -> tuple[Call, Coroutine[Any, Any, Any]]:
    call = await generate(kit, "count", routing=router)

    async def first() -> Any:
        return await anext(aiter(call))

    return call, first()


async def typed_stream(
    kit: TestKit, router: Thinking
) -> tuple[AsyncGenerator[int, None], Coroutine[Any, Any, Any]]:
    stream = kit.client(Worker, routing=router).count()

    async def first() -> Any:
        return await anext(stream)

    return stream, first()


Begin = Callable[[TestKit, Thinking], Coroutine[Any, Any, tuple[Any, Coroutine[Any, Any, Any]]]]


@pytest.mark.parametrize("begin", [untyped, untyped_stream, typed_stream])
def test_a_call_that_is_left_while_its_router_thinks_is_not_sent(begin: Begin) -> None:
    async def story(kit: TestKit) -> tuple[int, bool, list[str]]:
        actor, router = await worker_of(kit), Thinking()
        call, first = await begin(kit, router)
        reading = asyncio.ensure_future(first)
        await router.asked.wait()

        await call.aclose()
        router.told.set()

        with pytest.raises(Cancelled) as caught:
            await reading
        del call, reading
        gc.collect()
        await asyncio.sleep(LONG)
        return actor.calls, caught.value.started, router.events

    assert on_a_kit(story) == (0, False, ["Cancelled"])


def test_a_call_that_is_left_in_a_pause_is_not_repeated() -> None:
    async def story(kit: TestKit) -> tuple[int, bool]:
        actor = await worker_of(kit)
        busy = asyncio.ensure_future(kit.client(Worker).alone(0.5))
        await asyncio.sleep(0.1)
        with call_options(retries=9):
            call = await generate(kit, "alone", 0.0)
        waiting = asyncio.ensure_future(_result(call))
        await asyncio.sleep(0.05)

        await call.aclose()
        await busy

        with pytest.raises(Cancelled) as caught:
            await waiting
        await asyncio.sleep(LONG)
        return actor.calls, caught.value.started

    assert on_a_kit(story) == (1, False)


def test_a_call_that_may_have_started_before_it_was_left_says_so() -> None:
    async def story(kit: TestKit) -> tuple[bool, int]:
        await worker_of(kit)
        with call_options(retries=9, idempotency_key="k"):
            call = await generate(kit, "slow")
        waiting = asyncio.ensure_future(_result(call))
        await asyncio.sleep(1.0)
        error = UnknownOutcome("gone")
        sent = call._invocation.call  # pyright: ignore[reportPrivateUsage]
        assert sent is not None
        sent.fail(error)
        await asyncio.sleep(0.01)

        await call.aclose()

        with pytest.raises(Cancelled) as caught:
            await waiting
        return caught.value.started, kit.caller.caller.in_flight(WORKER_A)

    assert on_a_kit(story) == (True, 0)


def test_a_call_that_is_left_while_the_bus_is_away_is_not_sent() -> None:
    async def story(kit: TestKit) -> int:
        actor = await worker_of(kit)
        with call_options(instance="a"):
            call = await generate(kit, "where")
        kit.bus.stop()
        waiting = asyncio.ensure_future(_result(call))
        await asyncio.sleep(0.1)

        await call.aclose()
        kit.bus.start()

        with pytest.raises(Cancelled):
            await waiting
        await asyncio.sleep(LONG)
        return actor.calls

    assert on_a_kit(story) == 0


def test_a_call_that_is_left_while_it_waits_for_an_instance_is_not_sent() -> None:
    async def story(kit: TestKit) -> int:
        with call_options(wait=60.0):
            call = await generate(kit, "where")
        waiting = asyncio.ensure_future(_result(call))
        await asyncio.sleep(0.1)

        await call.aclose()
        actor = await worker_of(kit)

        with pytest.raises(Cancelled):
            await waiting
        return actor.calls

    assert on_a_kit(story) == 0


@pytest.mark.parametrize("endpoint", ["where", "count"])
def test_a_call_that_was_left_before_it_was_awaited_is_refused(endpoint: str) -> None:
    async def story(kit: TestKit) -> int:
        actor = await worker_of(kit)
        call = await generate(kit, endpoint)

        await call.aclose()

        with pytest.raises(Cancelled):
            await call
        await asyncio.sleep(LONG)
        return actor.calls

    assert on_a_kit(story) == 0


def test_items_that_came_as_a_stream_was_left_are_not_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(kit: TestKit) -> object:
        await worker_of(kit)
        stream = kit.client(Worker).count()
        await anext(stream)
        closing: list[asyncio.Task[None]] = []
        wake = PendingCall.wake

        def close_and_wake(call: PendingCall) -> None:
            # The items are there, and the stream is left before its reader runs.
            closing.append(asyncio.get_running_loop().create_task(aclose(stream)))
            wake(call)

        with monkeypatch.context() as patch:
            patch.setattr(PendingCall, "wake", close_and_wake)
            item = await anext(stream, "no more")
        await asyncio.gather(*closing)
        return item

    assert on_a_kit(story) == "no more"


async def aclose(stream: AsyncGenerator[int, None]) -> None:
    await stream.aclose()


@pytest.mark.parametrize("begin", [untyped, untyped_stream, typed_stream])
def test_a_call_that_was_left_unsent_is_observed_as_cancelled_once(begin: Begin) -> None:
    exporter = InMemorySpanExporter()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))

    async def story(kit: TestKit) -> None:
        await worker_of(kit)
        router = Thinking()
        call, first = await begin(kit, router)
        reading = asyncio.ensure_future(first)
        await router.asked.wait()
        await call.aclose()
        router.told.set()
        await asyncio.wait({reading})
        assert isinstance(reading.exception(), Cancelled)

    on_a_kit(story, telemetry=Telemetry(tracers, None))

    (span,) = exporter.get_finished_spans()
    assert [event.name for event in span.events] == ["cancelled"]


async def _result(call: Call) -> Any:
    return await call
