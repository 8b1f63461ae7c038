"""A router that asks for it is told how each attempt goes: each event once, and always the end."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from tests.story import on_a_kit

from dynbus import (
    Actor,
    ConfigError,
    DynbusError,
    HandlerError,
    Instance,
    InvalidRequest,
    InvalidResponse,
    Overloaded,
    Route,
    RouteRequest,
    StreamLost,
    call_options,
    depends,
    handler,
)
from dynbus.bus.protocol.names import InstanceName
from dynbus.testing import TestKit, run


class Worker(Actor, namespace="observed"):
    @handler
    async def where(self) -> str:
        return self.instance_id

    @handler
    async def fail(self) -> None:
        raise ValueError("no")

    @handler(concurrency=1, queue=0)
    async def alone(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return self.instance_id

    @handler(idempotent=True)
    async def slow(self) -> str:
        await asyncio.sleep(5.0)
        return self.instance_id

    @handler
    async def count(self, limit: int) -> AsyncGenerator[int, None]:
        for number in range(limit):
            yield number

    @handler
    async def drip(self) -> AsyncGenerator[int, None]:
        for number in range(1000):
            yield number
            await asyncio.sleep(1.0)

    @handler
    async def late(self) -> AsyncGenerator[int, None]:
        await asyncio.sleep(30.0)
        yield 1


WORKER_A = InstanceName(Worker.__dynbus_service__.namespace, Worker.__dynbus_component__, "a")


class Misread(Actor, namespace="observed", component="Worker"):
    """The same component as its callers believe it to be."""

    @handler
    async def where(self) -> AsyncGenerator[str, None]:
        yield ""

    @handler
    async def count(self, limit: int) -> AsyncGenerator[list[str], None]:
        yield []


class Relay(Actor, namespace="observed"):
    """Calls the worker from within a handler, by the router that the test has set."""

    worker = depends(Worker)

    @handler
    async def where(self) -> str:
        return await self.worker.where()


class Observer:
    """Writes down what it is told, with the number of its attempt."""

    def __init__(self, events: list[str], attempt: int) -> None:
        self._events = events
        self._attempt = attempt

    def started(self) -> None:
        self._events.append(f"{self._attempt} started")

    def first_item(self) -> None:
        self._events.append(f"{self._attempt} first item")

    def ended(self, error: DynbusError | None) -> None:
        self._events.append(f"{self._attempt} ended {'well' if error is None else error.code}")


class Observing:
    """Picks the first instance by id, and observes every attempt."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.requests: list[RouteRequest] = []

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Route:
        self.requests.append(request)
        self.events.append(f"{len(self.requests)} routed")
        chosen = min(instance.id for instance in instances)
        return Route(chosen, Observer(self.events, len(self.requests)))


Story = Callable[[TestKit, Worker], Awaitable[object]]


def told(story: Story) -> list[str]:
    """What the observers of `story` are told, which has the instances a and b."""
    router = Observing()

    async def whole(kit: TestKit) -> None:
        for name in ("a", "b"):
            await kit.start(Worker, instance_id=name)
        await story(kit, kit.client(Worker, routing=router))
        await asyncio.sleep(0)

    on_a_kit(whole)
    return router.events


def test_a_result_is_told_as_first_item_and_end() -> None:
    events = told(lambda kit, worker: worker.where())

    assert events == ["1 routed", "1 started", "1 first item", "1 ended well"]


@pytest.mark.parametrize("limit", [1, 2, 1000])
def test_a_stream_tells_of_its_first_item_once(limit: int) -> None:
    async def story(kit: TestKit, worker: Worker) -> None:
        assert [number async for number in worker.count(limit)] == list(range(limit))

    assert told(story) == ["1 routed", "1 started", "1 first item", "1 ended well"]


def test_a_stream_without_items_ends_without_a_first_one() -> None:
    async def story(kit: TestKit, worker: Worker) -> None:
        assert [number async for number in worker.count(0)] == []

    assert told(story) == ["1 routed", "1 started", "1 ended well"]


def test_an_error_of_the_handler_is_told() -> None:
    async def story(kit: TestKit, worker: Worker) -> None:
        with pytest.raises(HandlerError):
            await worker.fail()

    assert told(story) == ["1 routed", "1 started", "1 ended HandlerError"]


def test_a_call_that_is_never_sent_ends_without_a_start() -> None:
    router = Observing()

    async def story(kit: TestKit) -> None:
        await kit.start(Worker, instance_id="a")
        with pytest.raises(InvalidRequest):
            await anext(kit.client(Misread, routing=router).where())

    on_a_kit(story)

    assert router.events == ["1 routed", "1 ended InvalidRequest"]


def test_the_deadline_ends_the_attempt() -> None:
    async def story(kit: TestKit, worker: Worker) -> None:
        with pytest.raises(DynbusError), call_options(timeout=1.0):
            await worker.slow()

    assert told(story) == ["1 routed", "1 started", "1 ended DeadlineExceeded"]


def unary(worker: Worker) -> Awaitable[str]:
    return worker.slow()


def first_of_stream(worker: Worker) -> Awaitable[int]:
    return anext(worker.late())


@pytest.mark.parametrize("call", [unary, first_of_stream])
def test_cancelling_who_awaits_ends_the_attempt(call: Callable[[Worker], Awaitable[Any]]) -> None:
    async def story(kit: TestKit, worker: Worker) -> None:
        task = asyncio.ensure_future(call(worker))
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.wait({task})

    assert told(story) == ["1 routed", "1 started", "1 ended Cancelled"]


async def leave(items: AsyncGenerator[int, None]) -> None:
    async for _ in items:
        break


async def close(items: AsyncGenerator[int, None]) -> None:
    await anext(items)
    await items.aclose()
    await items.aclose()


async def throw(items: AsyncGenerator[int, None]) -> None:
    await anext(items)
    with pytest.raises(KeyError):
        await items.athrow(KeyError("enough"))


async def drop(items: AsyncGenerator[int, None]) -> None:
    await anext(items)
    del items
    gc.collect()
    await asyncio.sleep(0)


async def cancel_second(items: AsyncGenerator[int, None]) -> None:
    await anext(items)
    reading = asyncio.ensure_future(anext(items))
    await asyncio.sleep(0.1)
    reading.cancel()
    await asyncio.wait({reading})


@pytest.mark.parametrize("how", [leave, close, throw, drop, cancel_second])
def test_however_a_reader_leaves_the_attempt_ends_once(
    how: Callable[[AsyncGenerator[int, None]], Awaitable[None]],
) -> None:
    async def story(kit: TestKit, worker: Worker) -> None:
        await how(worker.drip())
        gc.collect()
        await asyncio.sleep(5.0)

    assert told(story) == ["1 routed", "1 started", "1 first item", "1 ended Cancelled"]


def test_an_item_that_does_not_fit_ends_the_attempt() -> None:
    router = Observing()

    async def story(kit: TestKit) -> None:
        await kit.start(Worker, instance_id="a")
        with pytest.raises(InvalidResponse):
            await anext(kit.client(Misread, routing=router).count(1))

    on_a_kit(story, schema_check="off")

    assert router.events == ["1 routed", "1 started", "1 first item", "1 ended InvalidResponse"]


def test_an_attempt_that_is_refused_ends_before_the_next_is_routed() -> None:
    async def story(kit: TestKit, worker: Worker) -> None:
        busy = asyncio.ensure_future(kit.client(Worker, routing=Observing()).alone(5.0))
        await asyncio.sleep(1.0)
        assert await worker.alone(0.0) == "b"
        await busy

    assert told(story) == [
        "1 routed",
        "1 started",
        "1 ended Overloaded",
        "2 routed",
        "2 started",
        "2 first item",
        "2 ended well",
    ]


def test_the_attempt_at_an_instance_that_dies_ends_before_the_next_is_routed() -> None:
    async def story(kit: TestKit, worker: Worker) -> None:
        slow = asyncio.ensure_future(worker.slow())
        await asyncio.sleep(1.0)
        await kit.kill(kit.started["a"])
        assert await slow == "b"

    events = told(story)

    assert events[:4] == ["1 routed", "1 started", "1 ended UnknownOutcome", "2 routed"]
    assert events[-1] == f"{len([e for e in events if 'routed' in e])} ended well"
    assert len([event for event in events if "ended" in event]) == int(events[-1][0])


def test_a_stream_whose_instance_dies_ends_lost() -> None:
    async def story(kit: TestKit, worker: Worker) -> None:
        stream = worker.drip()
        await anext(stream)
        await kit.kill(kit.started["a"])
        with pytest.raises(StreamLost):
            [item async for item in stream]

    assert told(story) == ["1 routed", "1 started", "1 first item", "1 ended StreamLost"]


@pytest.mark.parametrize("awaited", [True, False])
def test_an_untyped_call_is_routed_and_observed_once(awaited: bool) -> None:
    router = Observing()

    async def story(kit: TestKit) -> None:
        await kit.start(Worker, instance_id="a")
        client = await kit.caller.endpoint("observed.Worker.count").client(routing=router)
        call = client.generate(2)
        stream = await call if awaited else call
        assert [number async for number in stream] == [0, 1]
        await call.aclose()

    on_a_kit(story)

    assert router.events == ["1 routed", "1 started", "1 first item", "1 ended well"]


# What an observer does wrong ---------------------------------------------------------------


class Failing:
    """Raises whatever it is told."""

    def started(self) -> None:
        raise KeyError("at the start")

    def first_item(self) -> None:
        raise KeyError("at the first item")

    def ended(self, error: DynbusError | None) -> None:
        raise KeyError("at the end")


class Asynchronous:
    async def started(self) -> None:
        return

    async def first_item(self) -> None:
        return

    async def ended(self, error: DynbusError | None) -> None:
        return


class Returning:
    """Returns what a test gives it, whatever a type checker thinks of that."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Route:
        return self._answer  # type: ignore[no-any-return]


def answers(answer: Any) -> list[object]:
    """What a unary call and a stream give by a router that returns `answer`."""

    async def story(kit: TestKit) -> list[object]:
        await kit.start(Worker, instance_id="a")
        worker = kit.client(Worker, routing=Returning(answer))
        return [await worker.where(), [number async for number in worker.count(3)]]

    return on_a_kit(story)


def test_an_observer_that_raises_is_logged_and_harms_no_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        assert answers(Route("a", Failing())) == ["a", [0, 1, 2]]

    assert [record.getMessage() for record in caplog.records] == [
        "Failing.started of a router raised",
        "Failing.first_item of a router raised",
        "Failing.ended of a router raised",
    ] * 2
    assert "at the first item" in caplog.text


@pytest.mark.parametrize("event", ["started", "first_item", "ended"])
@pytest.mark.parametrize("kind", [asyncio.CancelledError, GeneratorExit, SystemExit, StopIteration])
def test_no_exception_of_an_observer_harms_the_call(
    kind: type[BaseException], event: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Harmful(Observer):
        pass

    def harm(self: Harmful, *event: object) -> None:
        raise kind("harm")

    setattr(Harmful, event, harm)

    with caplog.at_level(logging.ERROR):
        assert answers(Route("a", Harmful([], 1))) == ["a", [0, 1, 2]]

    assert len(caplog.records) == 2


def test_a_method_of_an_observer_that_cannot_be_had_is_logged_and_harms_no_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events: list[str] = []

    class Guarded(Observer):
        pass

    def refuse(self: Guarded) -> object:
        raise ValueError("not yet")

    Guarded.started = property(refuse)  # type: ignore[assignment,method-assign]

    with caplog.at_level(logging.ERROR):
        assert answers(Route("a", Guarded(events, 1))) == ["a", [0, 1, 2]]

    assert [record.getMessage().rpartition(".")[2] for record in caplog.records] == [
        "started of a router raised"
    ] * 2
    assert events == ["1 first item", "1 ended well"] * 2


def test_an_interrupt_within_an_observer_ends_the_call_and_leaves_none_behind() -> None:
    class Interrupted(Observer):
        def started(self) -> None:
            raise KeyboardInterrupt

    async def story() -> int:
        async with TestKit() as kit:
            await kit.start(Worker, instance_id="a")
            router = Returning(Route("a", Interrupted([], 1)))
            try:
                await kit.client(Worker, routing=router).slow()
            except KeyboardInterrupt:
                return kit.caller.caller.in_flight(WORKER_A)
        raise AssertionError("it was not interrupted")

    assert run(story()) == 0


def test_an_asynchronous_observer_is_told_so_and_harms_no_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        assert answers(Route("a", Asynchronous())) == ["a", [0, 1, 2]]  # type: ignore[arg-type]

    assert caplog.records[0].getMessage() == (
        "Asynchronous.started of a router did nothing, since it is asynchronous: write `def`"
    )


def test_a_route_without_an_observer_is_like_its_id() -> None:
    assert answers(Route("a")) == ["a", [0, 1, 2]]


def test_an_observer_without_its_methods_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        answers(Route("a", object()))  # type: ignore[arg-type]

    assert str(caught.value).startswith(
        "router Returning gave an observer without the methods started, first_item, ended: "
    )


def test_a_route_to_what_was_not_offered_ends_with_the_refusal() -> None:
    events: list[str] = []

    with pytest.raises(ConfigError, match="picked 'c'; it was offered a"):
        answers(Route("c", Observer(events, 1)))

    assert events == ["1 ended ConfigError"]


# What a router sees ------------------------------------------------------------------------


def test_a_router_sees_whose_call_it_is_and_which_attempt() -> None:
    router = Observing()

    async def story(kit: TestKit) -> None:
        for name in ("a", "b"):
            await kit.start(Worker, instance_id=name)
        busy = asyncio.ensure_future(kit.client(Worker, routing=Observing()).alone(5.0))
        await asyncio.sleep(1.0)
        with call_options(request_id="mine", priority=7, metadata={"tenant": "x"}):
            await kit.client(Worker, routing=router).alone(0.0)
        await busy

    on_a_kit(story)

    assert [(one.request_id, one.attempt) for one in router.requests] == [("mine", 1), ("mine", 2)]
    assert {one.priority for one in router.requests} == {7}
    assert [dict(one.metadata) for one in router.requests] == [{"tenant": "x"}] * 2


def test_a_router_of_a_sub_call_sees_what_the_request_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Observing()
    monkeypatch.setattr(Relay.__dict__["worker"], "routing", router)

    async def story(kit: TestKit) -> None:
        await kit.start(Worker, instance_id="a")
        await kit.start(Relay)
        with call_options(request_id="mine", priority=3, metadata={"tenant": "x"}):
            await kit.client(Relay).where()

    on_a_kit(story)

    (seen,) = router.requests
    assert (seen.request_id, seen.attempt, seen.priority) == ("mine", 1, 3)
    assert dict(seen.metadata) == {"tenant": "x"}


def test_a_call_that_says_nothing_has_neither_priority_nor_metadata() -> None:
    router = Observing()

    async def story(kit: TestKit) -> None:
        await kit.start(Worker, instance_id="a")
        await kit.client(Worker, routing=router).where()

    on_a_kit(story)

    (seen,) = router.requests
    assert (seen.attempt, seen.priority, dict(seen.metadata)) == (1, 0, {})
    assert seen.request_id


def test_a_router_that_refuses_by_a_typed_error_has_nothing_observed() -> None:
    class Full:
        async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Route:
            raise Overloaded("every instance is full", started=False)

    async def story(kit: TestKit) -> None:
        await kit.start(Worker, instance_id="a")
        with pytest.raises(Overloaded):
            await kit.client(Worker, routing=Full()).where()

    on_a_kit(story)
