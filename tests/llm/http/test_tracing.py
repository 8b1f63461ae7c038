"""One trace of a request, from HTTP to its last token, and the figures of it."""

from __future__ import annotations

import json
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

from dynbus.bus.telemetry.telemetry import Telemetry

from .served import served

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


async def test_a_request_is_one_trace_from_http_to_the_engine() -> None:
    observed = Observed()
    async with (
        served(telemetry=observed.telemetry) as front,
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.chat.completions.with_raw_response.create(
            model="tiny",
            messages=[{"role": "user", "content": "say it is secret"}],
            temperature=0.5,
            extra_headers={"traceparent": PARENT},
        )
        await eventually(lambda: "POST /v1/chat/completions" in observed.spans())
        await eventually(lambda: "process test.ScriptedEngine.generate" in observed.spans())
        spans = observed.spans()
        figures = observed.figures()

    names = (
        "POST /v1/chat/completions",
        "chat tiny",
        "tokenize",
        "send test.ScriptedEngine.generate",
        "process test.ScriptedEngine.generate",
    )
    server, chat, tokenize, send, process = (spans[name] for name in names)
    assert {f"{_context(span).trace_id:032x}" for span in spans.values()} == {TRACE}
    assert server.kind is SpanKind.SERVER
    parents = [span.parent and span.parent.span_id for span in (chat, tokenize, send, process)]
    context = [_context(span).span_id for span in (server, chat, chat, send)]
    assert parents == context
    assert f"{_context(server).span_id:016x}" in answer.headers["traceparent"]
    told = dict(chat.attributes or {})
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "tiny"
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    usage = answer.parse().usage
    assert usage is not None
    assert told["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == usage.completion_tokens
    assert [event.name for event in chat.events] == ["first_token"]
    assert "secret" not in str([span.to_json() for span in spans.values()])
    assert {
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
        "gen_ai.server.request.duration",
        "gen_ai.client.token.usage",
    } <= figures


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
