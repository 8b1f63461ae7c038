"""Figures and spans of a topic: events that are published from here, and heard by instances for
themselves. Those of a group have the figures of jobs."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import StrEnum

from dynbus.bus.context import Context
from dynbus.bus.protocol.names import TOPIC, EndpointName
from dynbus.bus.telemetry.telemetry import CallObservation, Telemetry
from dynbus.bus.telemetry.trace_context import trace_fields


class EventEnd(StrEnum):
    """The outcome of an event at one process."""

    PUBLISHED = "published"
    HEARD = "heard"
    """A method has returned."""
    FAILED = "failed"
    """A method has raised, or the event is not of its type."""
    DROPPED = "dropped"
    """An instance was too far behind."""


class TopicFigures:
    """The counters and spans of one process for a topic; none without telemetry."""

    def __init__(self, telemetry: Telemetry | None, namespace: str, topic: str) -> None:
        self._telemetry = telemetry
        self._address = EndpointName(namespace, TOPIC, topic)
        self._labels = (("dynbus.namespace", namespace), ("dynbus.topic", topic))

    def __repr__(self) -> str:
        return f"<TopicFigures {self._address}>"

    @contextmanager
    def publishing(self, event_id: str) -> Generator[Mapping[str, str]]:
        """A span while the block runs, of the caller's trace, and what carries that trace on."""
        parent = Context.current()
        if self._telemetry is None:
            yield {} if parent is None else parent.trace_headers()
            return
        sent = self._telemetry.publish_event(self._address, event_id=event_id, parent=parent)
        try:
            yield sent.trace_headers
        except BaseException as error:
            sent.end(error)
            raise
        sent.end()
        self.count(EventEnd.PUBLISHED)

    def hearing(
        self, method: EndpointName, headers: Mapping[str, str], event_id: str
    ) -> CallObservation | None:
        """Begin to observe a method with an event, in the trace that its headers carry; None
        without telemetry."""
        if self._telemetry is None:
            return None
        return self._telemetry.attempt(method, trace_fields(headers), job_id=event_id, tries=1)

    def count(self, end: EventEnd) -> None:
        """Count an event that has come to an end here."""
        if self._telemetry is not None and self._telemetry.metrics is not None:
            tally = self._telemetry.metrics.tally(
                "topic.events", "{event}", "Events of topics, by what became of them here."
            )
            tally.add((*self._labels, ("dynbus.result", str(end))))
