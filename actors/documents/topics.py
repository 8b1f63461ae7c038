"""Topics in an AsyncAPI document: where events are published, and who hears them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from dynbus.actors.declaring.actor import Subscription
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import topic_subject
from dynbus.bus.topics import TopicConfig

from .schemas import header_schema

EVENT_HEADERS: Final = "dynbus.EventHeaders"
KEY_PARAMETER: Final = "key"


def channel_of(topic: TopicConfig) -> str:
    """The name of the channel of a topic."""
    return f"{topic}.events"


def event_channel(topic: TopicConfig) -> dict[str, Any]:
    """The channel to which the events of a topic are published."""
    kept = (
        "Events of plain NATS: those hear them who listen."
        if topic.retain is None
        else f"Events, kept for {topic.retain:g} s, stored once a JetStream publish is confirmed."
    )
    return {
        "address": topic_subject(topic.namespace, topic.name, "{key}"),
        "description": kept,
        "messages": {"event": {"$ref": f"#/components/messages/{topic}.event"}},
        "parameters": {KEY_PARAMETER: {"$ref": f"#/components/parameters/{KEY_PARAMETER}"}},
    }


def event_message(topic: TopicConfig, body: Mapping[str, Any]) -> dict[str, Any]:
    """The message of an event.

    Args:
        body: its content type and payload.
    """
    return {
        "name": f"{topic}.event",
        "title": f"Event of {topic.name}",
        "headers": {"$ref": f"#/components/schemas/{EVENT_HEADERS}"},
        **body,
    }


def event_operation(
    topic: TopicConfig, subscription: Subscription, described: Mapping[str, Any]
) -> dict[str, Any]:
    """The operation of a method that hears a topic.

    Args:
        described: what is said of the method.
    """
    channel = channel_of(topic)
    return {
        "action": "receive",
        "channel": {"$ref": f"#/channels/{channel}"},
        **described,
        "x-dynbus": {"kind": "event", **_extension(topic, subscription)},
        "messages": [{"$ref": f"#/channels/{channel}/messages/event"}],
    }


def _extension(topic: TopicConfig, subscription: Subscription) -> dict[str, Any]:
    fields: dict[str, Any] = {"topic": str(topic), "retain": topic.retain}
    if topic.retain is not None:
        fields["stream"] = topic.stream
    if not subscription.group:
        return fields
    start, options = subscription.start, subscription.options
    return fields | {
        "group": subscription.group,
        "from": start.isoformat() if isinstance(start, datetime) else start,
        "ordered": options.ordered,
        "tries": options.tries,
        "backoff": options.retry_delay,
        "ack_wait": options.ack_wait,
        "max_age": options.max_age,
    }


def event_schemas() -> dict[str, Any]:
    """The schema of the headers of events."""
    return {
        EVENT_HEADERS: {
            "type": "object",
            "description": "All of them may be left out; others reach the method's context.",
            "properties": {
                headers.MESSAGE_ID: header_schema(
                    "The id of the event: a repeat within 120 s is not stored."
                ),
                headers.JOB: header_schema("The same.", minLength=1, maxLength=128),
                headers.REQUEST_ID: header_schema("Names the request in logs and sub-calls."),
                headers.PRIORITY: header_schema("An integer, for the calls that the method makes."),
                headers.METADATA: header_schema("key=value,key=value, percent-encoded."),
                headers.TRACEPARENT: header_schema("The trace, as W3C writes it."),
                headers.TRACESTATE: header_schema("As W3C writes it."),
                headers.BAGGAGE: header_schema("As W3C writes it."),
            },
        }
    }


KEY: Final[Mapping[str, Any]] = {
    "description": "What an event is about: 1 to 64 letters, digits, '_' or '-', others as the "
    "protocol of dynbus says; '=' for an event about nothing in particular."
}
