"""What an engine does with a request is told in spans of the call that asked."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.telemetry.telemetry import Telemetry
from dynbus.llm.engine import Step
from dynbus.llm.engine.interface import Prefill
from dynbus.llm.engine.tracing import EngineTrace
from dynbus.llm.generation import Generated, GenerateRequest

REQUEST = GenerateRequest([1, 2, 3], 5)


def spans_of(story: Callable[[EngineTrace], object]) -> dict[str, dict[str, object]]:
    """The spans that have ended after a story, by name, each with what it says."""
    exporter = InMemorySpanExporter()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    trace = EngineTrace.of(Telemetry(tracers, None), InstanceName("llm", "Engine", "a"))
    assert trace is not None
    with tracers.get_tracer("test").start_as_current_span("process"):
        trace.submitted("a", REQUEST)
    story(trace)
    assert repr(trace) == "<EngineTrace [0 requests, 0 recorded]>"
    told = exporter.get_finished_spans()
    [parent] = [span.context for span in told if span.name == "process"]
    children = [span for span in told if span.name != "process"]
    assert all(span.parent == parent for span in children)
    return {span.name: dict(span.attributes or {}) for span in children}


def test_a_request_waits_is_computed_and_decoded() -> None:
    def story(trace: EngineTrace) -> None:
        trace.stepped(Step((), admitted=["a"]), 0.0)
        first = ("a", Generated([7], cached_tokens=2))
        trace.stepped(Step([first], prefilled=[Prefill("a", 2, 3)]), 0.0)
        trace.stepped(Step([("a", Generated([8, 9], finish_reason="stop"))]), 0.0)
        trace.ended("a")

    assert spans_of(story) == {
        "queue": {},
        "prefill": {
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.cache_read.input_tokens": 2,
            "dynbus.engine.chunks": 3,
        },
        "decode": {
            "gen_ai.usage.output_tokens": 3,
            "gen_ai.response.finish_reasons": ("stop",),
        },
    }


def test_an_engine_that_tells_nothing_of_prompts_is_known_by_its_first_token() -> None:
    def story(trace: EngineTrace) -> None:
        trace.stepped(Step([("a", Generated([7])), ("b", Generated([1]))]), 0.0)
        trace.ended("a")

    assert spans_of(story) == {
        "prefill": {"gen_ai.usage.input_tokens": 3},
        "decode": {"gen_ai.usage.output_tokens": 1},
    }


def test_a_request_that_is_left_while_it_waits_has_only_waited() -> None:
    def story(trace: EngineTrace) -> None:
        trace.stepped(Step(()), 0.0)
        trace.ended("a")
        trace.ended("a")

    assert spans_of(story) == {"queue": {}}
