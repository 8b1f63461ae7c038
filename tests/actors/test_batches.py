"""A handler of batches is called like any other: one request, one result."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel
from tests.conditions import eventually

from dynbus import (
    Actor,
    Cancelled,
    ConfigError,
    Context,
    HandlerError,
    InvalidRequest,
    InvalidResponse,
    Runtime,
    call_options,
    depends,
    handler,
)
from dynbus.actors.declaring.batching import BatchDeclared
from dynbus.bus.nats.server_process import RunningServer
from dynbus.testing import Telemetry, TestKit, run


class Text(BaseModel):
    text: str
    language: str = "en"

    @property
    def length(self) -> int:
        return len(self.text)


class Vector(BaseModel):
    numbers: list[float]


class Embedder(Actor, namespace="batches"):
    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    @handler(batch=4, batch_wait="5ms", batch_key="language", batch_size_of="length")
    async def embed(self, texts: list[Text]) -> list[Vector | Exception]:
        self.batches.append([one.text for one in texts])
        await asyncio.sleep(0.01)
        return [
            Vector(numbers=[float(one.length)]) if one.text else InvalidRequest("it is empty")
            for one in texts
        ]

    @handler(batch=2, batch_wait=3600)
    async def patient(self, texts: list[str], *, context: Context | None = None) -> list[str]:
        assert context is not None
        return [f"{one} in {context.metadata.get('tenant')}" for one in texts]

    @handler(batch=2)
    async def wrong(self, numbers: list[int]) -> list[int]:
        return ["one", *numbers[1:]]  # type: ignore[list-item]


class Caller(Actor, namespace="batches"):
    embedder = depends(Embedder)

    @handler
    async def ask(self, text: Text) -> Vector:
        return await self.embedder.embed(text)


def test_calls_go_together_by_key_and_each_has_its_own_result() -> None:
    async def story() -> list[list[str]]:
        async with TestKit() as kit:
            instance = await kit.start(Embedder)
            client = kit.client(Embedder)
            texts = [Text(text="a" * n, language="de" if n > 4 else "en") for n in range(1, 7)]
            found = await asyncio.gather(*map(client.embed, texts))
            assert [each.numbers for each in found] == [[float(n)] for n in range(1, 7)]
            assert isinstance(instance.actor, Embedder)
            return instance.actor.batches

    assert run(story()) == [["a", "aa", "aaa", "aaaa"], ["aaaaa", "aaaaaa"]]


def test_an_actor_calls_it_and_one_request_fails_alone() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Embedder)
            await kit.start(Caller)
            client = kit.client(Caller)
            good, bad = await asyncio.gather(
                client.ask(Text(text="abc")), client.ask(Text(text="")), return_exceptions=True
            )
            assert good == Vector(numbers=[3.0])
            assert isinstance(bad, InvalidRequest)
            assert bad.hop.startswith("batches.Embedder.embed@")

    run(story())


def test_a_request_that_does_not_fit_is_in_no_batch() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Embedder)
            with pytest.raises(InvalidRequest, match=r"text: Field required"):
                await kit.client(Embedder).embed({})  # type: ignore[arg-type]
            endpoint = await kit.caller.endpoint("batches.Embedder.embed").client()
            with pytest.raises(InvalidRequest):
                await endpoint.generate([{"text": "a list of them"}])

    run(story())


def test_a_result_that_does_not_fit_is_its_own_caller_s_error() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Embedder)
            client = kit.client(Embedder)
            numbers = [client.wrong(1), client.wrong(2)]
            found = await asyncio.gather(*numbers, return_exceptions=True)
            assert isinstance(found[0], InvalidResponse)
            assert found[1] == 2

    run(story())


def test_what_callers_have_in_common_is_the_metadata_of_their_batch() -> None:
    async def story() -> list[str]:
        async with TestKit() as kit:
            await kit.start(Embedder)
            client = kit.client(Embedder)
            with call_options(metadata={"tenant": "a"}):
                return list(await asyncio.gather(client.patient("one"), client.patient("two")))

    assert run(story()) == ["one in a", "two in a"]


def test_a_caller_that_leaves_is_in_no_batch_that_begins_later() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            instance = await kit.start(Embedder)
            client = kit.client(Embedder)
            call = asyncio.ensure_future(client.patient("left"))
            await eventually(lambda: instance.server.execution.load == 1)
            call.cancel()
            await eventually(lambda: instance.server.execution.load == 0)

            pair = await asyncio.gather(client.patient("one"), client.patient("two"))

            assert list(pair) == ["one in None", "two in None"]

    run(story())


def test_a_drain_answers_who_waits_for_others() -> None:
    async def story() -> str:
        async with TestKit() as kit:
            instance = await kit.start(Embedder)
            call = asyncio.ensure_future(kit.client(Embedder).patient("one"))
            await eventually(lambda: instance.server.execution.load == 1)
            await instance.stop(grace=5.0)
            return await call

    assert run(story()) == "one in None"


def test_an_operator_s_cancel_takes_its_own_call_out_of_the_batch() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            instance = await kit.start(Embedder)
            client = kit.client(Embedder)
            with call_options(request_id="to-cancel"):
                cancelled = asyncio.ensure_future(client.patient("one"))
            await eventually(lambda: instance.server.execution.load == 1)
            (call,) = instance.server.ledger.calls()
            instance.server.execution.cancel(call, 0.0, "an operator")
            with pytest.raises(Cancelled):
                await cancelled
            pair = await asyncio.gather(client.patient("two"), client.patient("three"))
            assert list(pair) == ["two in None", "three in None"]

    run(story())


def test_batches_over_a_real_server(nats_server: RunningServer) -> None:

    async def story() -> list[Vector]:
        async with (
            Runtime.connect(nats_server.url) as far,
            Runtime.connect(nats_server.url) as near,
        ):
            instance = await far.start(Embedder)
            await near.discovery.wait_for_instance(instance.name)
            client = near.client(Embedder)
            return list(
                await asyncio.gather(*(client.embed(Text(text="a" * n)) for n in range(1, 50)))
            )

    found = asyncio.run(story())

    assert [each.numbers[0] for each in found] == list(range(1, 50))


# What observers see -----------------------------------------------------------------------------


class Seen:
    """Telemetry that is read back."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.telemetry = Telemetry(provider, MeterProvider([self.reader], shutdown_on_exit=False))

    def spans(self, operation: str) -> list[ReadableSpan]:
        named = f"{operation} batches.Embedder.embed"
        return [each for each in self.exporter.get_finished_spans() if each.name == named]

    def points(self, name: str) -> list[Any]:
        found = self.reader.get_metrics_data()
        assert found is not None
        return [
            point
            for resource in found.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


def embedded(seen: Seen, *lengths: int) -> None:
    async def story() -> None:
        async with TestKit(telemetry=seen.telemetry) as kit:
            await kit.start(Embedder)
            client = kit.client(Embedder)
            await asyncio.gather(*(client.embed(Text(text="a" * n)) for n in lengths))

    run(story())


def test_each_call_has_its_span_and_the_batch_one_with_a_link_to_each() -> None:
    seen = Seen()

    embedded(seen, 1, 2, 3)

    calls, (batch,) = seen.spans("process"), seen.spans("batch")
    assert len(calls) == 3
    links = {link.context.span_id for link in batch.links}
    assert links == {each.context.span_id for each in calls if each.context is not None}
    assert batch.parent is not None
    assert (batch.parent.trace_id, batch.parent.span_id) in {
        (link.context.trace_id, link.context.span_id) for link in batch.links
    }
    attributes = dict(batch.attributes or {})
    assert attributes["messaging.batch.message_count"] == 3
    assert "dynbus.instance_id" in attributes


def test_the_size_the_wait_and_the_padding_of_batches_are_metrics() -> None:
    seen = Seen()

    embedded(seen, 1, 1, 4)

    (size,), (wait,) = seen.points("dynbus.batch.size"), seen.points("dynbus.batch.wait.duration")
    (padding,) = seen.points("dynbus.batch.padding")
    assert (size.count, size.sum) == (1, 3)
    assert wait.count == 3
    assert wait.sum == pytest.approx(0.015)
    # Three of four: 12 places, of which 6 are used.
    assert padding.sum == pytest.approx(0.5)
    assert dict(size.attributes)["dynbus.endpoint"] == "embed"


def test_a_size_that_cannot_be_told_fails_no_call(caplog: pytest.LogCaptureFixture) -> None:
    class Sized(Actor, namespace="batches", component="Sized"):
        @handler(batch=2, batch_size_of=lambda text: 1 / 0)
        async def echo(self, texts: list[str]) -> list[str]:
            return texts

    async def story() -> str:
        async with TestKit(telemetry=Seen().telemetry) as kit:
            await kit.start(Sized)
            return await kit.client(Sized).echo("a")

    with caplog.at_level(logging.ERROR):
        assert run(story()) == "a"

    assert "batch_size_of failed" in caplog.text


# What is declared -------------------------------------------------------------------------------


def test_schemas_and_documents_show_one_request_and_one_result() -> None:
    spec = Embedder.__dynbus_handlers__["embed"]

    assert set(spec.schemas.request_read["properties"]) == {"text", "language"}
    assert set(spec.schemas.reply_written["properties"]) == {"numbers"}


def test_one_batch_runs_at_a_time_unless_told() -> None:
    specs = Embedder.__dynbus_handlers__

    assert specs["embed"].concurrency == 1
    assert specs["embed"].batch is not None
    assert specs["embed"].batch.wait == 0.005


def test_functions_without_a_class_take_batches_too() -> None:
    @handler(batch=3)
    async def double(numbers: list[int]) -> list[int]:
        return [2 * each for each in numbers]

    async def story() -> list[int]:
        async with TestKit() as kit:
            runtime = await kit.runtime()
            async with runtime.serve_endpoints("batches", "Plain", {"double": double}):
                client = await kit.caller.endpoint("batches.Plain.double").client()
                await client.wait_for_instances()
                return list(await asyncio.gather(*(client.generate(n) for n in range(5))))

    assert run(story()) == [0, 2, 4, 6, 8]


def declare(method: Any, **options: Any) -> None:
    handler(**options)(method)


class Methods:
    async def takes_one(self, text: str) -> list[str]:
        return [text]

    async def takes_any(self, texts: tuple[str, ...]) -> list[str]:
        return list(texts)

    async def gives_one(self, texts: list[str]) -> str:
        return texts[0]

    async def gives_errors_alone(self, texts: list[str]) -> list[ValueError]:
        return []

    async def takes_none(self) -> list[str]:
        return []

    async def has_default(self, texts: list[str] = []) -> list[str]:  # noqa: B006
        return texts

    async def streams(self, texts: list[str]) -> Any:
        yield texts

    async def takes_texts(self, texts: list[Text]) -> list[str]:
        return []


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (Methods.takes_one, "takes_one takes str and is called with a batch: annotate a list"),
        (
            Methods.takes_any,
            r"takes_any takes tuple\[str, \.\.\.\] and is called with a batch",
        ),
        (
            Methods.gives_one,
            "gives_one returns str and is called with a batch: annotate a list with one",
        ),
        (Methods.gives_errors_alone, r"returns list\[ValueError\] and is called with a batch"),
        (
            Methods.takes_none,
            "takes_none takes no request and is called with a batch: give it a list",
        ),
        (Methods.has_default, "'texts' has a default, and a batch is never left out: remove it"),
    ],
)
def test_a_signature_without_lists_is_refused_where_it_is_declared(method: Any, told: str) -> None:
    with pytest.raises(BatchDeclared, match=told):
        declare(method, batch=2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch": 0}, "batch=0 must be the calls of a batch, 1 or more"),
        ({"batch": "8"}, "batch='8' must be the calls of a batch"),
        ({"batch_wait": "5ms"}, "batch_wait='5ms' is of batches: give batch= as well"),
        ({"batch_key": "language"}, "batch_key='language' is of batches: give batch="),
        ({"batch": 2, "batch_wait": "soon"}, "batch_wait='soon' must be 0 or more seconds, or"),
        ({"batch": 2, "batch_wait": -1}, "batch_wait=-1 must be 0 or more seconds"),
        ({"batch": 2, "batch_key": 3}, "batch_key=3 must be the name of a field of the request"),
        ({"batch": 2, "batch_key": "no field"}, "batch_key='no field' must be the name of a field"),
        (
            {"batch": 2, "batch_key": "langage"},
            "batch_key='langage' is no field of Text; it has text, language, length",
        ),
        ({"batch": 2, "batch_size_of": "size"}, "batch_size_of='size' is no field of Text"),
    ],
)
def test_options_that_are_not_usable_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        declare(Methods.takes_texts, **options)

    assert told in str(raised.value)


def test_a_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match="streams, and batch= is for handlers that return"):
        declare(Methods.streams, batch=2)


def test_a_list_of_the_wrong_length_is_a_handler_error_that_says_so() -> None:
    class Short(Actor, namespace="batches"):
        @handler(batch=2)
        async def cut(self, texts: list[str]) -> list[str]:
            return texts[:-1]

    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Short)
            with pytest.raises(HandlerError, match=r"cut returned a list of 0 for 1 request: "):
                await kit.client(Short).cut("a")

    run(story())


def test_a_durable_handler_takes_no_batches() -> None:
    with pytest.raises(ConfigError, match="is durable, and jobs are done one by one"):
        declare(Methods.takes_texts, batch=2, durable=True)
