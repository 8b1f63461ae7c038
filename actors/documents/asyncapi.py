"""The AsyncAPI document of actors: their subjects, messages and operations.

It is made of the classes alone, and the same for the same classes, so that it can be kept beside
them and compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from dynbus.actors.declaring.actor import DeclaredActor, Subscription
from dynbus.actors.declaring.codec import AnyCodec
from dynbus.actors.declaring.handlers import HandlerSpec
from dynbus.bus.errors import ERRORS, STATUS_CODES
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import ComponentName
from dynbus.bus.topics import TopicConfig

from .jobs import (
    JOB_PARAMETER,
    durable_extension,
    job_channels,
    job_messages,
    job_operations,
    job_schemas,
    schedule_extension,
)
from .schemas import Components, SchemaUse, header_schema, whole_schema
from .topics import (
    KEY,
    KEY_PARAMETER,
    channel_of,
    event_channel,
    event_message,
    event_operation,
    event_schemas,
)

VERSION: Final = "3.0.0"
JSON_TYPE: Final = "application/json"
BYTES_TYPE: Final = "application/octet-stream"
REQUEST_HEADERS: Final = "dynbus.RequestHeaders"
ERROR_HEADERS: Final = "dynbus.ErrorHeaders"
ERROR: Final = "dynbus.error"
END: Final = "dynbus.end"
NOTHING: Final[Mapping[str, Any]] = {"description": "Empty."}
MAY_BE_EMPTY: Final = "May be empty: the handler's default is taken then."


class DocumentedActor(NamedTuple):
    """An actor class where it is on the bus."""

    address: ComponentName
    actor: type[DeclaredActor]

    def handlers(self) -> Iterator[tuple[str, HandlerSpec]]:
        """Its handlers, each with its subject."""
        for spec in self.actor.__dynbus_handlers__.values():
            yield f"{self.address}.{spec.name}", spec

    def subscriptions(self) -> Iterator[tuple[TopicConfig, Subscription]]:
        """Its methods that hear topics, each with its topic where it is."""
        for one in self.actor.__dynbus_subscriptions__.values():
            yield one.topic.config(self.address.namespace), one


def message_schemas(actors: Sequence[DocumentedActor]) -> dict[SchemaUse, dict[str, Any]]:
    """The schema of each message of the actors, as a document of its own.

    Raises:
        ConfigError: an annotation of a handler cannot be used, or a schema not be written.
    """
    schemas: dict[SchemaUse, dict[str, Any]] = {}
    for one in actors:
        for _, spec in one.handlers():
            request = spec.request_codec
            if request is not None:
                place = SchemaUse(str(one.address), spec.name, "request")
                schemas[place] = whole_schema(request, place)
            place = SchemaUse(str(one.address), spec.name, _result(spec))
            schemas[place] = whole_schema(spec.result_codec, place)
        for _, subscription in one.subscriptions():
            codec = subscription.spec.request_codec
            if codec is not None:
                place = SchemaUse(str(one.address), subscription.spec.name, "event")
                schemas[place] = whole_schema(codec, place)
    return schemas


def asyncapi(
    actors: Sequence[DocumentedActor],
    schemas: Mapping[SchemaUse, Mapping[str, Any]],
    *,
    title: str,
    version: str,
) -> dict[str, Any]:
    """The AsyncAPI document of actors.

    Args:
        actors: no two at one address.
        schemas: of their messages, as `message_schemas` makes them.
        version: of what is documented.
    """
    ordered = sorted(actors, key=lambda one: one.address)
    components = Components(schemas, _class_names(ordered))
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    for one in ordered:
        for subject, spec in one.handlers():
            own = _messages(one, subject, spec, components)
            messages |= own
            channels |= _channels(subject, spec)
            operations |= _operations(one, subject, spec)
            if spec.durable is not None:
                name = one.address.endpoint(spec.name)
                messages |= job_messages(subject, spec, own)
                channels |= job_channels(name, spec.durable)
                operations |= job_operations(name, _described(one, spec))
        for topic, subscription in one.subscriptions():
            spec = subscription.spec
            payload = components.payload(SchemaUse(str(one.address), spec.name, "event"))
            body = {**_body(spec.request_codec), "payload": payload}
            # Those that hear a topic read the same events.
            messages.setdefault(f"{topic}.event", event_message(topic, body))
            channels.setdefault(channel_of(topic), event_channel(topic))
            hears = event_operation(topic, subscription, _described(one, spec))
            operations[f"{one.address}.{spec.name}.hear"] = hears
    has_events = any(one.actor.__dynbus_subscriptions__ for one in ordered)
    has_jobs = any(spec.durable is not None for one in ordered for _, spec in one.handlers())
    return {
        "asyncapi": VERSION,
        "info": {
            "title": title,
            "version": version,
            "description": _INTRODUCTION,
            "tags": [_tag(one) for one in ordered],
        },
        "defaultContentType": JSON_TYPE,
        "channels": channels,
        "operations": operations,
        "components": {
            "schemas": {
                **components.all(),
                ERROR_HEADERS: _error_headers(),
                REQUEST_HEADERS: _request_headers(),
                **(job_schemas() if has_jobs else {}),
                **(event_schemas() if has_events else {}),
            },
            "messages": {**messages, END: _END, ERROR: _error()},
            "parameters": {
                "instance": {"description": "The id of one instance, as discovery has it."},
                **({JOB_PARAMETER: _JOB} if has_jobs else {}),
                **({KEY_PARAMETER: KEY} if has_events else {}),
            },
        },
    }


def _result(spec: HandlerSpec) -> str:
    return "item" if spec.streaming else "reply"


def _class_names(actors: Sequence[DocumentedActor]) -> dict[SchemaUse, str]:
    """The classes that requests and results are of, by name."""
    names: dict[SchemaUse, str] = {}
    for one in actors:
        for _, spec in one.handlers():
            for role, codec in (
                ("request", spec.request_codec),
                (_result(spec), spec.result_codec),
            ):
                kind: Any = codec.annotation if codec is not None else None
                if isinstance(kind, type) and kind.__module__ not in ("builtins", "typing"):
                    names[SchemaUse(str(one.address), spec.name, role)] = kind.__name__
        for _, subscription in one.subscriptions():
            spec = subscription.spec
            kind = spec.request_codec and spec.request_codec.annotation
            if isinstance(kind, type) and kind.__module__ not in ("builtins", "typing"):
                names[SchemaUse(str(one.address), spec.name, "event")] = kind.__name__
    return names


def _tag(one: DocumentedActor) -> dict[str, Any]:
    description = _text(vars(one.actor).get("__doc__"))
    return {"name": str(one.address), **({"description": description} if description else {})}


def _text(docstring: Any) -> str:
    return inspect.cleandoc(docstring) if isinstance(docstring, str) else ""


# Messages ----------------------------------------------------------------------------------------


def _messages(
    one: DocumentedActor, subject: str, spec: HandlerSpec, components: Components
) -> dict[str, Any]:
    address, result = str(one.address), _result(spec)
    request: dict[str, Any] = {
        "name": f"{subject}.request",
        "title": f"Request to {spec.name}",
        "contentType": JSON_TYPE,
        "headers": {"$ref": f"#/components/schemas/{REQUEST_HEADERS}"},
        "correlationId": {"location": f"$message.header#/{headers.REQUEST_ID}"},
        "payload": NOTHING,
    }
    if spec.request_codec is not None:
        request |= _body(spec.request_codec)
        request["payload"] = components.payload(SchemaUse(address, spec.name, "request"))
        if spec.parameter is not None and spec.default is not inspect.Parameter.empty:
            request["description"] = MAY_BE_EMPTY
    answer: dict[str, Any] = {
        "name": f"{subject}.{result}",
        "title": f"{'Item of' if spec.streaming else 'Reply of'} {spec.name}",
        **_body(spec.result_codec),
        "payload": components.payload(SchemaUse(address, spec.name, result)),
    }
    return {f"{subject}.request": request, f"{subject}.{result}": answer}


def _body(codec: AnyCodec | None) -> dict[str, Any]:
    is_bytes = codec is not None and codec.annotation is bytes
    return {"contentType": BYTES_TYPE if is_bytes else JSON_TYPE}


_END: Final[Mapping[str, Any]] = {
    "name": END,
    "title": "End of a stream",
    "description": "An empty message without a reply subject.",
    "payload": NOTHING,
}


def _error() -> dict[str, Any]:
    return {
        "name": ERROR,
        "title": "Error",
        "description": "An empty message whose headers say what went wrong. It ends the call.",
        "headers": {"$ref": f"#/components/schemas/{ERROR_HEADERS}"},
        "payload": NOTHING,
    }


def _request_headers() -> dict[str, Any]:
    return {
        "type": "object",
        "description": "All of them may be left out.",
        "properties": {
            headers.REQUEST_ID: header_schema(
                "Names the request in logs, errors and sub-calls; made when it is absent.",
                minLength=1,
                maxLength=128,
            ),
            headers.DEADLINE: header_schema(
                "Milliseconds that are left for the call when it is sent.", pattern="^[0-9]+$"
            ),
            headers.PRIORITY: header_schema(
                "An integer; larger is more urgent.", pattern="^-?[0-9]+$"
            ),
            headers.IDEMPOTENCY_KEY: header_schema(
                "Names the effect: the call may be repeated.", minLength=1, maxLength=128
            ),
            headers.METADATA: header_schema(
                "key=value,key=value, percent-encoded, for the handler."
            ),
            headers.TRACEPARENT: header_schema("The trace, as W3C writes it."),
            headers.TRACESTATE: header_schema("As W3C writes it."),
            headers.BAGGAGE: header_schema("As W3C writes it."),
            headers.FRAMES: header_schema(
                "Asks for frames in place of plain JSON: see the protocol of dynbus."
            ),
        },
    }


def _error_headers() -> dict[str, Any]:
    codes = {code: STATUS_CODES.get(code, 500) for code in sorted(ERRORS)}
    return {
        "type": "object",
        "required": [headers.SERVICE_ERROR, headers.SERVICE_ERROR_CODE, headers.ERROR],
        "properties": {
            headers.SERVICE_ERROR: header_schema("The code and the message of the error."),
            headers.SERVICE_ERROR_CODE: header_schema(
                "Its number: "
                + ", ".join(f"{number} {code}" for code, number in codes.items() if number != 500)
                + "; 500 for every other.",
                pattern="^[0-9]{3}$",
            ),
            headers.ERROR: header_schema(
                "Its code: one of these, or one of the program's own errors.",
                examples=list(codes),
            ),
        },
    }


# Channels and operations -------------------------------------------------------------------------


def _channels(subject: str, spec: HandlerSpec) -> dict[str, Any]:
    request = {"request": {"$ref": f"#/components/messages/{subject}.request"}}
    answers = {
        name: {"$ref": f"#/components/messages/{message}"}
        for name, message in _answers(subject, spec).items()
    }
    answer = (
        "An item for each message, and an empty one at the end."
        if spec.streaming
        else "One message."
    )
    return {
        subject: {
            "address": subject,
            "description": "Requests to any instance.",
            "messages": request,
        },
        f"{subject}.instance": {
            "address": f"{subject}.{{instance}}",
            "description": "Requests to one instance.",
            "messages": request,
            "parameters": {"instance": {"$ref": "#/components/parameters/instance"}},
        },
        f"{subject}.reply": {
            "address": None,
            "description": f"The reply subject of the request, which is an inbox. {answer}",
            "messages": answers,
        },
    }


def _answers(subject: str, spec: HandlerSpec) -> dict[str, str]:
    result = _result(spec)
    end = {"end": END} if spec.streaming else {}
    return {result: f"{subject}.{result}", **end, "error": ERROR}


def _operations(one: DocumentedActor, subject: str, spec: HandlerSpec) -> dict[str, Any]:
    described = _described(one, spec)
    reply = {
        "channel": {"$ref": f"#/channels/{subject}.reply"},
        "messages": [
            {"$ref": f"#/channels/{subject}.reply/messages/{name}"}
            for name in _answers(subject, spec)
        ],
    }

    def operation(channel: str, **more: Any) -> dict[str, Any]:
        return {
            "action": "receive",
            "channel": {"$ref": f"#/channels/{channel}"},
            **described,
            **more,
            "messages": [{"$ref": f"#/channels/{channel}/messages/request"}],
            "reply": reply,
        }

    queue = {"nats": {"queue": one.address.component, "bindingVersion": "0.1.0"}}
    return {
        subject: operation(subject, bindings=queue),
        f"{subject}.instance": operation(f"{subject}.instance"),
    }


def _described(one: DocumentedActor, spec: HandlerSpec) -> dict[str, Any]:
    made: dict[str, Any] = {"title": spec.name}
    description = _text(spec.function.__doc__)
    if description:
        made["summary"] = " ".join(description.partition("\n\n")[0].split())
        made["description"] = description
    made["tags"] = [{"name": str(one.address)}]
    made["x-dynbus"] = {
        "kind": spec.kind,
        "schema-hash": spec.schemas.hash,
        "timeout": spec.timeout,
        "idempotent": spec.idempotent,
    }
    if spec.durable is not None:
        made["x-dynbus"] |= {
            "durable": durable_extension(one.address.endpoint(spec.name), spec.durable),
            **schedule_extension(spec),
        }
    return made


_JOB: Final[Mapping[str, Any]] = {
    "description": "The name of a job: 1 to 64 letters, digits, '_' or '-'; others as the protocol "
    "of dynbus says."
}
_INTRODUCTION: Final = (
    "Actors on NATS, served by dynbus. A request is a message with a reply subject: one to the "
    "subject of an endpoint goes to any instance, one with an instance's id behind it to that "
    "one. Answers are plain JSON, and frames for clients that ask for them."
)
