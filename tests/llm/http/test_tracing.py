"""One trace of a request, from HTTP to its last token, and the figures of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.conditions import eventually
from tests.llm.text.tiny_tokenizer import tiny_tokenizer

from dynbus.bus.telemetry.telemetry import Telemetry
from dynbus.llm.http.content import MAX_CONTENT, Content
from dynbus.llm.mock.worker import MockWorker
from dynbus.llm.openai.requests import chat_of
from dynbus.llm.parsing.delta import Delta, ToolCallDelta

from .served import card, served

pytestmark = pytest.mark.anyio

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Observed:
    """Telemetry whose spans and figures can be read back."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        tracers = TracerProvider(shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.telemetry = Telemetry(tracers, meters)

    def spans(self) -> dict[str, ReadableSpan]:
        """The spans that have ended, by name."""
        return {span.name: span for span in self._exporter.get_finished_spans()}

    def figures(self) -> set[str]:
        """The names of what was measured."""
        found = self._reader.get_metrics_data()
        assert found is not None
        return set(_names(json.loads(found.to_json())))


def _names(found: Any) -> Iterator[str]:
    for resource in found["resource_metrics"]:
        for scope in resource["scope_metrics"]:
            for metric in scope["metrics"]:
                yield metric["name"]


def _context(span: ReadableSpan) -> Any:
    assert span.context is not None
    return span.context


async def test_a_request_is_one_trace_from_http_to_its_last_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    observed = Observed()
    engine = card("mock", "llm.MockWorker.generate")
    async with (
        served(telemetry=observed.telemetry) as front,
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
    ):
        await front.kit.start(
            MockWorker,
            block_size=4,
            max_num_seqs=2,
            max_num_batched_tokens=8,
            speedup_ratio=100.0,
            vocabulary=100,
        )
        front.catalog.change({"mock": engine})
        await eventually(lambda: front.front_end.shared.models.names == ["mock"])
        answer = await client.chat.completions.with_raw_response.create(
            model="mock",
            messages=[{"role": "user", "content": "say it is secret"}],
            temperature=0.5,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"traceparent": PARENT},
        )
        chunks = [chunk async for chunk in answer.parse()]
        await eventually(lambda: "POST /v1/chat/completions" in observed.spans())
        await eventually(lambda: "process llm.MockWorker.generate" in observed.spans())
        spans = observed.spans()
        figures = observed.figures()

    names = (
        "POST /v1/chat/completions",
        "chat mock",
        "tokenize",
        "route",
        "send llm.MockWorker.generate",
        "process llm.MockWorker.generate",
        "queue",
        "prefill",
        "decode",
    )
    server, chat, tokenize, route, send, process, queue, prefill, decode = (
        spans[name] for name in names
    )
    assert {f"{_context(span).trace_id:032x}" for span in spans.values()} == {TRACE}
    assert server.kind is SpanKind.SERVER
    for parent, children in (
        (server, (chat,)),
        (chat, (tokenize, route, send)),
        (send, (process,)),
        (process, (queue, prefill, decode)),
    ):
        for child in children:
            assert child.parent is not None
            assert child.parent.span_id == _context(parent).span_id, child.name
    # One after the other.
    for parts in ((tokenize, route), (queue, prefill, decode)):
        times = [at or 0 for part in parts for at in (part.start_time, part.end_time)]
        assert times == sorted(times)
        assert times[0] > 0
    assert [event.name for event in decode.events] == ["first_token"]

    assert f"{_context(server).span_id:016x}" in answer.headers["traceparent"]
    usage = chunks[-1].usage
    assert usage is not None
    told = dict(chat.attributes or {})
    assert [event.name for event in chat.events] == ["first_token"]
    assert told.pop("gen_ai.response.time_to_first_chunk") > 0  # type: ignore[operator]
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "dynbus",
        "gen_ai.request.model": "mock",
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.response.id": chunks[0].id,
        "gen_ai.response.model": "mock",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    assert dict(prefill.attributes or {}) == {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": 0,
        # Of eight tokens each.
        "dynbus.engine.chunks": -(-usage.prompt_tokens // 8),
    }
    assert dict(decode.attributes or {}) == {
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
    }
    # Nobody has asked for what was said.
    assert "POST /v1/chat/completions 200" in caplog.text
    told_of_all = caplog.text + str([span.to_json() for span in spans.values()])
    assert "secret" not in told_of_all
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert len(said) > 3
    assert said not in told_of_all
    assert {
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
        "gen_ai.server.request.duration",
        "gen_ai.client.token.usage",
        "dynbus.engine.queue.duration",
        "dynbus.engine.prefill.duration",
    } <= figures


async def test_embeddings_are_one_trace_with_the_calls_of_their_texts() -> None:
    observed = Observed()
    cards = {"tiny": card("tiny", "test.ScriptedEngine.embed", types=["embedding"])}
    async with (
        served(cards, telemetry=observed.telemetry) as front,
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
    ):
        await client.embeddings.create(
            model="tiny", input="one", dimensions=2, extra_headers={"traceparent": PARENT}
        )
        await eventually(lambda: "POST /v1/embeddings" in observed.spans())
        await eventually(lambda: "process test.ScriptedEngine.embed" in observed.spans())
        spans, figures = observed.spans(), observed.figures()

    names = (
        "POST /v1/embeddings",
        "embeddings tiny",
        "tokenize",
        "send test.ScriptedEngine.embed",
        "process test.ScriptedEngine.embed",
    )
    assert {f"{_context(spans[name]).trace_id:032x}" for name in names} == {TRACE}
    asked = dict(spans["embeddings tiny"].attributes or {})
    assert asked["gen_ai.operation.name"] == "embeddings"
    assert asked["gen_ai.embeddings.dimension.count"] == 2
    assert asked["gen_ai.request.encoding_formats"] == ("base64",)
    assert asked["gen_ai.usage.input_tokens"] == len(tiny_tokenizer().encode("one"))
    assert {"gen_ai.server.request.duration", "gen_ai.client.token.usage"} <= figures


async def test_an_error_is_told_by_its_spans() -> None:
    observed = Observed()
    async with (
        served(telemetry=observed.telemetry) as front,
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(APIError):
            await client.completions.create(model="tiny", prompt="fail x")
        await eventually(lambda: "POST /v1/completions" in observed.spans())
        spans = observed.spans()

    assert spans["text_completion tiny"].status.status_code is StatusCode.ERROR
    attributes = dict(spans["POST /v1/completions"].attributes or {})
    assert attributes["http.response.status_code"] == 500
    assert attributes["error.type"] == "HandlerError"


@pytest.mark.parametrize("streams", [False, True])
async def test_what_is_said_is_told_where_it_is_asked_for(
    streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    observed = Observed()
    messages = [
        {"role": "system", "content": "Be \n brief."},
        {"role": "user", "content": "say it"},
    ]
    async with (
        served(telemetry=observed.telemetry, log_content=True) as front,
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
    ):
        create: Any = client.chat.completions.create
        answer = await create(model="tiny", messages=messages, stream=streams)
        if streams:
            assert [chunk async for chunk in answer]
        await eventually(lambda: "POST /v1/chat/completions" in observed.spans())
        spans = observed.spans()

    told = dict(spans["chat tiny"].attributes or {})
    asked, answered = told["gen_ai.input.messages"], told["gen_ai.output.messages"]
    assert json.loads(str(asked)) == [
        {"role": one["role"], "parts": [{"type": "text", "content": one["content"]}]}
        for one in messages
    ]
    assert json.loads(str(answered)) == [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "it"}],
            "finish_reason": "stop",
        }
    ]
    assert f"input={asked} output={answered}" in caplog.text


def test_of_what_is_said_so_much_is_kept() -> None:
    long = "x" * MAX_CONTENT
    request = chat_of(
        {
            "model": "tiny",
            "messages": [
                {"role": "user", "content": "gone"},
                {"role": "assistant", "content": f"before {long}"},
                {"role": "user", "content": [{"type": "text", "text": "last"}]},
            ],
        }
    )
    content = Content(request)
    for place in range(3):
        content.said(place % 2, Delta("y" * 3000), None)

    asked = json.loads(content.input_messages)
    answered = json.loads(content.output_messages)

    texts = [one["parts"][0]["content"] for one in asked]
    assert texts == ["x" * (MAX_CONTENT - 4), "last"]
    lengths = [len(one["parts"][0]["content"]) for one in answered]
    assert lengths == [3000, MAX_CONTENT - 3000]
    assert {one["finish_reason"] for one in answered} == {"error"}


def test_calls_of_tools_and_their_results_are_told_as_such() -> None:
    call = {"id": "call_1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    request = chat_of(
        {
            "model": "tiny",
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [call, 3]},
                {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
            ],
        }
    )
    content = Content(request)
    content.said(0, Delta("", "so", (ToolCallDelta(0, "call_2", "g", '{"b"'),)), None)
    content.said(0, Delta("", "", (ToolCallDelta(0, arguments=":2}"),)), "tool_calls")

    asked, answered = json.loads(content.input_messages), json.loads(content.output_messages)

    called = {"type": "tool_call", "id": "call_1", "name": "f", "arguments": '{"a": 1}'}
    assert asked[0]["parts"][0] == called
    result = {"type": "tool_call_response", "id": "call_1", "response": "ok"}
    assert asked[1] == {"role": "tool", "parts": [result]}
    assert answered == [
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "so"},
                {"type": "tool_call", "id": "call_2", "name": "g", "arguments": '{"b":2}'},
            ],
            "finish_reason": "tool_calls",
        }
    ]
