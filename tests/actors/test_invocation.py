"""One logical call over several attempts: what is repeated, where, and what is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel, model_validator
from tests.story import on_a_kit

from dynbus import (
    Actor,
    DeadlineExceeded,
    HandlerError,
    InvalidRequest,
    InvalidResponse,
    Migrate,
    NoInstances,
    Overloaded,
    RouteRequest,
    Unavailable,
    UnknownOutcome,
    call_options,
    context,
    handler,
)
from dynbus.bus.clock import monotonic
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import control_subject
from dynbus.bus.records.instance_view import Instance
from dynbus.bus.telemetry.telemetry import Telemetry
from dynbus.testing import TestKit, run


class First:
    """Prefers the instances in the order of their ids."""

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> str:
        return min(instance.id for instance in instances)


class Worker(Actor, namespace="attempts"):
    @handler
    async def where(self) -> str:
        return self.instance_id

    @handler(migration_limit=1)
    async def migrate(self) -> str:
        if self.instance_id == "a":
            raise Migrate("not here")
        return self.instance_id

    @handler(migration_limit=1)
    async def migrate_stream(self) -> AsyncGenerator[str, None]:
        if self.instance_id == "a":
            raise GeneratorExit
        yield self.instance_id

    @handler
    async def stay(self) -> str:
        raise Migrate("not here")

    @handler(concurrency=1, queue=0)
    async def alone(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return self.instance_id

    @handler
    async def slow(self) -> str:
        await asyncio.sleep(5.0)
        return f"{self.instance_id} {context().attempt}"

    @handler(idempotent=True)
    async def slow_idempotent(self) -> str:
        await asyncio.sleep(5.0)
        return f"{self.instance_id} {context().attempt}"

    @handler
    async def key(self) -> str:
        return context().idempotency_key

    @handler
    async def fail(self) -> None:
        raise ValueError("no")

    @handler
    async def endless(self) -> AsyncGenerator[int, None]:
        await asyncio.Event().wait()
        yield 1


async def pair(kit: TestKit) -> Worker:
    for name in ("a", "b"):
        await kit.start(Worker, instance_id=name)
    return kit.client(Worker, routing=First())


def test_a_call_that_asks_to_migrate_goes_on_elsewhere() -> None:
    async def story(kit: TestKit) -> tuple[str, list[str]]:
        worker = await pair(kit)
        return await worker.migrate(), [name async for name in worker.migrate_stream()]

    assert on_a_kit(story) == ("b", ["b"])


def test_without_a_migration_limit_the_caller_is_told() -> None:
    async def story(kit: TestKit) -> None:
        with pytest.raises(Migrate):
            await (await pair(kit)).stay()

    on_a_kit(story)


def test_an_overloaded_instance_is_passed_over() -> None:
    async def story(kit: TestKit) -> list[str]:
        worker = await pair(kit)
        return sorted(await asyncio.gather(worker.alone(1.0), worker.alone(1.0)))

    assert on_a_kit(story) == ["a", "b"]


def test_when_all_are_overloaded_the_caller_is_told_when_to_come_again() -> None:
    async def story(kit: TestKit) -> Overloaded:
        worker = await pair(kit)
        busy = [asyncio.create_task(worker.alone(5.0)) for _ in range(2)]
        await asyncio.sleep(0.5)
        with pytest.raises(Overloaded) as caught:
            await worker.alone(0.0)
        await asyncio.gather(*busy)
        return caught.value

    assert on_a_kit(story).retry_after > 0


def test_retries_wait_until_there_is_room() -> None:
    async def story(kit: TestKit) -> str:
        worker = await pair(kit)
        busy = [asyncio.create_task(worker.alone(0.3)) for _ in range(2)]
        await asyncio.sleep(0.1)
        with call_options(retries=6):
            answer = await worker.alone(0.0)
        await asyncio.gather(*busy)
        return answer

    assert on_a_kit(story) in ("a", "b")


def test_a_call_whose_instance_dies_is_repeated_only_where_that_is_safe() -> None:
    async def story(kit: TestKit) -> str:
        worker = await pair(kit)
        unsafe = asyncio.create_task(worker.slow())
        safe = asyncio.create_task(worker.slow_idempotent())
        await asyncio.sleep(1.0)
        await kit.kill(kit.started["a"])
        with pytest.raises(UnknownOutcome):
            await unsafe
        return await safe

    assert on_a_kit(story) == "b 2"


def test_an_idempotency_key_reaches_the_handler_and_allows_a_repeat() -> None:
    async def story(kit: TestKit) -> tuple[str, str]:
        worker = await pair(kit)
        with call_options(idempotency_key="order-7"):
            key = await worker.key()
            slow = asyncio.create_task(worker.slow())
            await asyncio.sleep(1.0)
        await kit.kill(kit.started["a"])
        return key, await slow

    assert on_a_kit(story) == ("order-7", "b 2")


def test_an_error_of_the_handler_is_never_repeated() -> None:
    async def story(kit: TestKit) -> HandlerError:
        worker = await pair(kit)
        with call_options(retries=5), pytest.raises(HandlerError) as caught:
            await worker.fail()
        return caught.value

    assert on_a_kit(story).message == "ValueError: no"


def test_a_plain_client_cancels_its_call_by_request_id() -> None:
    async def story(kit: TestKit) -> str:
        await kit.start(Worker, instance_id="a")
        plain = await kit.bus.connect()
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        plain.subscribe("_INBOX.plain", lambda message: answered.set_result(message.headers))
        request = headers.encode({headers.REQUEST_ID: "mine"})
        cancel = headers.encode({headers.REQUEST_ID: "mine", headers.CANCEL: "kill"})
        plain.publish("attempts.Worker.slow", b"", reply="_INBOX.plain", headers=request)
        await asyncio.sleep(1.0)
        plain.publish(control_subject("attempts", "Worker", "a"), b"", headers=cancel)
        return headers.decode(await answered)[headers.SERVICE_ERROR_CODE]

    assert on_a_kit(story) == "499"


class Unary(Actor, namespace="kinds", component="Service"):
    @handler
    async def answer(self) -> str:
        return "once"

    @handler
    async def count(self) -> int:
        return 3


class Misread(Actor, namespace="kinds", component="Service"):
    @handler
    async def count(self) -> list[str]:
        return []


class Streaming(Actor, namespace="kinds", component="Service"):
    @handler
    async def answer(self) -> AsyncGenerator[str, None]:
        while True:
            yield "again"
            await asyncio.sleep(1.0)

    @handler
    async def count(self) -> AsyncGenerator[int, None]:
        yield 1


class Moody(BaseModel):
    count: int

    @model_validator(mode="before")
    @classmethod
    def check(cls, given: object) -> object:
        raise LookupError("no such count")


class Mistyped(Actor, namespace="kinds", component="Service"):
    """What a caller takes the service for whose validator raises what it should not."""

    @handler
    async def count(self) -> Moody:
        raise NotImplementedError


def test_whatever_a_validator_raises_is_told_of_a_result_as_of_an_item() -> None:
    async def story(kit: TestKit) -> InvalidResponse:
        await kit.start(Unary, instance_id="u")
        with pytest.raises(InvalidResponse) as caught:
            await kit.client(Mistyped).count()
        return caught.value

    error = on_a_kit(story, schema_check="off")

    assert error.message == "the result of kinds.Service.count: LookupError: no such count"
    assert isinstance(error.__cause__, LookupError)


def test_a_class_that_declares_a_stream_does_not_call_a_unary_endpoint() -> None:
    async def story(kit: TestKit) -> str:
        await kit.start(Unary, instance_id="u")

        with pytest.raises(InvalidRequest) as caught:
            [item async for item in kit.client(Streaming).answer()]

        assert not caught.value.started
        return str(caught.value)

    assert on_a_kit(story) == (
        "kinds.Service.answer is declared stream by the client's actor class, "
        "but instance u serves it as unary"
    )


@pytest.mark.parametrize("retries", [0, 3])
def test_a_class_that_declares_one_answer_does_not_wait_for_a_stream(retries: int) -> None:
    async def story(kit: TestKit) -> str:
        await kit.start(Streaming, instance_id="s")
        begun = monotonic()

        with pytest.raises(InvalidRequest) as caught, call_options(retries=retries):
            await kit.client(Unary).answer()

        assert monotonic() == begun
        return str(caught.value)

    assert on_a_kit(story) == (
        "kinds.Service.answer is declared unary by the client's actor class, "
        "but instance s serves it as stream"
    )


def test_a_call_passes_over_instances_that_serve_the_other_kind() -> None:
    async def story(kit: TestKit) -> list[str]:
        await kit.start(Streaming, instance_id="a")
        await kit.start(Unary, instance_id="b")
        client = kit.client(Unary, routing=First())
        return [await client.answer() for _ in range(3)]

    assert on_a_kit(story) == ["once"] * 3


class Mistaken(Actor, namespace="attempts", component="Worker"):
    """Sends a request to a handler that takes none."""

    @handler
    async def where(self, here: bool) -> str:
        raise NotImplementedError


class Counting(First):
    """Counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> str:
        self.asked += 1
        return await super().route(request, instances)


def test_a_request_that_one_instance_refuses_as_wrong_is_sent_to_no_other() -> None:
    router = Counting()

    async def story(kit: TestKit) -> InvalidRequest:
        await pair(kit)
        with pytest.raises(InvalidRequest, match="takes no request") as caught:
            await kit.client(Mistaken, routing=router).where(True)
        return caught.value

    assert not on_a_kit(story, schema_check="off").started
    assert router.asked == 1


def test_a_misspelt_endpoint_is_told_apart_from_a_dead_instance() -> None:
    async def story(kit: TestKit) -> InvalidRequest:
        await pair(kit)
        client = await kit.caller.endpoint("attempts.Worker.wher").client()
        with pytest.raises(InvalidRequest) as caught:
            await client.generate()
        return caught.value

    assert "has no endpoint 'wher'; it has alone, endless, fail, key" in str(on_a_kit(story))


def test_an_untyped_call_asks_the_router_once() -> None:
    async def story(kit: TestKit) -> list[str]:
        await pair(kit)
        client = await kit.caller.endpoint("attempts.Worker.where").client()
        return sorted([await client.round_robin() for _ in range(4)])

    assert on_a_kit(story) == ["a", "a", "b", "b"]


@pytest.mark.parametrize("instance", ["", "a"])
def test_learning_how_an_endpoint_answers_ends_at_the_deadline(instance: str) -> None:
    async def story(kit: TestKit) -> float:
        client = await kit.caller.endpoint("attempts.Worker.where").client()
        begun = monotonic()
        with (
            pytest.raises((DeadlineExceeded, NoInstances)),
            call_options(timeout=1.0, wait=60.0, instance=instance or None),
        ):
            await client.generate()
        return monotonic() - begun

    assert on_a_kit(story) == pytest.approx(1.0, abs=0.01)


# What telemetry sees -----------------------------------------------------------------------


class Watched:
    """A kit whose client spans are kept."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        tracers = TracerProvider(shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.kit = TestKit(
            telemetry=Telemetry(tracers, meters), connect_timeout=0.5, schema_check="off"
        )

    def sent(self) -> list[tuple[str, str]]:
        """Each client span with its error type."""
        spans = [span for span in self._exporter.get_finished_spans() if "send " in span.name]
        return [(span.name, str((span.attributes or {}).get("error.type", ""))) for span in spans]

    def events(self) -> list[str]:
        spans = [span for span in self._exporter.get_finished_spans() if "send " in span.name]
        return [event.name for span in spans for event in span.events]

    def counted(self) -> int:
        """Calls that the client has counted."""
        found = self._reader.get_metrics_data()
        assert found is not None
        return sum(
            int(point.value)
            for resource in found.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == "dynbus.calls"
            for point in metric.data.data_points
            if isinstance(point, NumberDataPoint)
            and (point.attributes or {}).get("dynbus.side") == "client"
        )


@pytest.mark.parametrize("kind", ["typed", "stream", "untyped", "untyped stream"])
def test_a_call_without_an_instance_has_a_span_and_is_counted(kind: str) -> None:
    watched = Watched()

    async def story() -> None:
        async with watched.kit as kit:
            client = kit.client(Worker)
            endpoint = await kit.caller.endpoint("attempts.Worker.where").client()
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "typed": client.where,
                "stream": lambda: anext(client.migrate_stream()),
                "untyped": endpoint.generate,
                "untyped stream": lambda: anext(aiter(endpoint.generate())),
            }

            with pytest.raises(NoInstances):
                await calls[kind]()

    run(story())

    name = "migrate_stream" if kind == "stream" else "where"
    assert watched.sent() == [(f"send attempts.Worker.{name}", "NoInstances")]
    assert watched.counted() == 1


def test_a_call_while_the_bus_is_away_has_a_span_and_is_counted() -> None:
    watched = Watched()

    async def story() -> None:
        async with watched.kit as kit:
            worker = await pair(kit)
            kit.bus.stop()
            with pytest.raises(Unavailable, match="cannot be reached"):
                await worker.where()

    run(story())

    assert watched.sent() == [("send attempts.Worker.where", "Unavailable")]
    assert watched.counted() == 1


def test_a_stream_whose_reader_is_cancelled_is_observed_as_cancelled() -> None:
    watched = Watched()

    async def story() -> None:
        async with watched.kit as kit:
            await pair(kit)
            reading = asyncio.ensure_future(anext(kit.client(Worker).endless()))
            await asyncio.sleep(1.0)
            reading.cancel()
            await asyncio.wait({reading})

    run(story())

    assert watched.events() == ["cancelled"]


def test_a_result_that_does_not_fit_is_observed_as_such() -> None:
    watched = Watched()

    async def story() -> None:
        async with watched.kit as kit:
            await kit.start(Unary)
            with pytest.raises(InvalidResponse):
                await kit.client(Misread).count()

    run(story())

    assert watched.sent() == [("send kinds.Service.count", "InvalidResponse")]
