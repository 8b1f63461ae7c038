"""The description of the interface, for programs (`/openapi.json`) and for people (`/docs`)."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple

import msgspec

from dynbus.llm.messages.requests import ConversationRequest, MessagesRequest
from dynbus.llm.models.card import ModelType
from dynbus.llm.openai.embeddings import EmbeddingsRequest
from dynbus.llm.openai.requests import ChatRequest, CompletionRequest
from dynbus.llm.openai.scores import RerankRequest, ScoreRequest
from dynbus.llm.openai.sessions import AnnouncedSession, AnnounceRequest
from dynbus.llm.openai.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from dynbus.llm.responses.requests import ResponsesRequest
from dynbus.llm.resumable.records import KEPT_SECONDS

from .batch_paths import BATCH_SCHEMAS, batch_paths
from .key_paths import KEY_SCHEMAS, key_paths
from .response_paths import RESPONSE_SCHEMAS, response_paths
from .schemas import (
    ANSWERS,
    CONDITIONS,
    REQUESTS,
    STRING,
    UNDESCRIBED,
    Schema,
    one_of,
    optional,
    record,
    ref,
)

_STATUSES: Final[Mapping[str, str]] = {
    "400": "The request is not usable.",
    "401": "A key is missing, or not known.",
    "403": "A page of another site asks, or the bus refuses the front end's credentials.",
    "404": "There is no such model.",
    "405": "The path does not take this method.",
    "408": "The body did not arrive in time.",
    "409": "The first request with this `Idempotency-Key` is still being answered.",
    "413": "The body or the request is too large.",
    "415": "The body is encoded in a way that is not understood.",
    "422": "The `Idempotency-Key` was sent with another request.",
    "429": "Too much is asked; `Retry-After` says when to ask again.",
    "499": "The client left.",
    "500": "An engine failed; its log says why.",
    "503": "No engine is there (`Retry-After` says when to ask again), or the front end stops.",
    "504": "The time is over.",
}

_ANTHROPICS: Final = {status: text for status, text in _STATUSES.items() if status != "422"}
"""Anthropic tells a field that does not fit like all else that is not usable."""


class _Post(NamedTuple):
    """A path that is answered by a model.

    Attributes:
        answer: the name of its schema.
        events: what a stream of it consists of; empty where there is none.
        model: what the model has to be there for.
    """

    summary: str
    request: type
    answer: str
    model: ModelType
    events: str = ""
    is_anthropics: bool = False


_ANY: Final = ModelType.Chat | ModelType.Completions
_SCORES: Final = ModelType.Score | ModelType.Embedding

POSTS: Final[Mapping[str, _Post]] = {
    "/v1/chat/completions": _Post(
        "Answer a conversation.",
        ChatRequest,
        "ChatCompletion",
        ModelType.Chat,
        "`chat.completion.chunk` objects; the last one is [DONE]",
    ),
    "/v1/completions": _Post(
        "Continue a text.",
        CompletionRequest,
        "Completion",
        ModelType.Completions,
        "`text_completion` objects; the last one is [DONE]",
    ),
    "/v1/responses": _Post(
        "Answer a conversation with items.",
        ResponsesRequest,
        "Response",
        ModelType.Chat,
        "from `response.created` to `response.completed`",
    ),
    "/v1/responses/input_tokens": _Post(
        "Count the tokens of the input of a response.",
        ResponsesRequest,
        "InputTokens",
        ModelType.Chat,
    ),
    "/v1/messages": _Post(
        "Answer a conversation, by Anthropic's interface.",
        MessagesRequest,
        "Message",
        ModelType.Chat,
        "from `message_start` to `message_stop`",
        is_anthropics=True,
    ),
    "/v1/messages/count_tokens": _Post(
        "Count the tokens of a conversation, by Anthropic's interface.",
        ConversationRequest,
        "TokenCount",
        ModelType.Chat,
        is_anthropics=True,
    ),
    "/v1/embeddings": _Post(
        "Make vectors of texts.", EmbeddingsRequest, "Embeddings", ModelType.Embedding
    ),
    "/v1/score": _Post("Score pairs of texts (`/score` too).", ScoreRequest, "Scores", _SCORES),
    "/v1/rerank": _Post(
        "Rank documents by a query (`/rerank` and `/v2/rerank` too).",
        RerankRequest,
        "Ranked",
        _SCORES,
    ),
    "/v1/sessions/announce": _Post(
        "Say that a conversation goes on soon, so that its blocks are ready then.",
        AnnounceRequest,
        "AnnouncedSession",
        _ANY,
    ),
    "/tokenize": _Post(
        "Tell the tokens of a text or a conversation.", TokenizeRequest, "Tokenized", _ANY
    ),
    "/detokenize": _Post("Tell the text of tokens.", DetokenizeRequest, "Detokenized", _ANY),
}


def _version() -> str:
    try:
        return version("dynbus")
    except PackageNotFoundError:
        return "0"


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _responses(
    content: Mapping[str, Any], statuses: Mapping[str, str], error: str
) -> dict[str, Any]:
    refused = {
        status: {"description": text, "content": _json(ref(error))}
        for status, text in statuses.items()
    }
    return {"200": {"description": "The answer.", "content": content}, **refused}


def _post(post: _Post) -> dict[str, Any]:
    content = _json(ref(post.answer))
    if post.events:
        event = record({"data": STRING}, {"event": STRING})
        content["text/event-stream"] = {
            "schema": {**event, "description": f"Events: {post.events}."}
        }
    is_anthropics = post.is_anthropics
    headers: list[dict[str, Any]] = [
        {
            "name": "Dynbus-Resumable",
            "in": "header",
            "schema": one_of("1"),
            "description": "Make a stream resumable; the answer has the header "
            "too, `0` with `Dynbus-Resumable-Reason` where it is none.",
        }
    ]
    return {
        "post": {
            "summary": post.summary,
            **({"parameters": headers} if post.events else {}),
            "requestBody": {"required": True, "content": _json(ref(post.request.__name__))},
            "responses": _responses(
                content,
                _ANTHROPICS if is_anthropics else _STATUSES,
                "MessagesError" if is_anthropics else "Error",
            ),
        }
    }


def _get(summary: str, content: Mapping[str, Any], *statuses: str) -> dict[str, dict[str, Any]]:
    refused = {status: _STATUSES[status] for status in ("401", "405", *statuses)}
    return {"get": {"summary": summary, "responses": _responses(content, refused, "Error")}}


def _stream() -> dict[str, Any]:
    """The path of a stream that is resumed."""
    refused = {
        **{status: _STATUSES[status] for status in ("400", "401", "405", "413", "429", "503")},
        "404": "There is no such stream of this key, or no model for it.",
        "408": _STATUSES["408"],
        "410": f"It cannot be resumed: its {KEPT_SECONDS:g} s are over, or it was too large.",
    }
    event = record({"data": STRING, "id": STRING}, {"event": STRING})
    described = {**event, "description": "The events after the last that was read."}
    return {
        "get": {
            "summary": "Resume a stream that was asked for with `Dynbus-Resumable: 1`.",
            "parameters": [
                {"name": "request", "in": "path", "required": True, "schema": STRING},
                {
                    "name": "Last-Event-ID",
                    "in": "header",
                    "schema": STRING,
                    "description": "`REQUEST.N`: the last event that was read; from the first on "
                    "without it.",
                },
            ],
            "responses": _responses({"text/event-stream": {"schema": described}}, refused, "Error"),
        }
    }


_BATCH_PATHS: Final = batch_paths(_STATUSES)
_RESPONSE_PATHS: Final = response_paths(_STATUSES)


def _document() -> dict[str, Any]:
    types = {post.request for post in POSTS.values()} | {Tokenized, Detokenized, AnnouncedSession}
    _, schemas = msgspec.json.schema_components(
        sorted(types, key=lambda one: one.__name__), ref_template="#/components/schemas/{name}"
    )
    for kind in types:
        for base in reversed(kind.__mro__):
            schemas[kind.__name__]["properties"].update(REQUESTS.get(base.__name__, {}))
        for name in UNDESCRIBED:
            schemas[kind.__name__]["properties"].pop(name, None)
        schemas[kind.__name__].update(CONDITIONS.get(kind.__name__, {}))
    ready = _get("Tell whether requests are answered.", _json(ref("Ready")))
    ready["get"]["responses"]["503"] = {
        "description": "They are not, and why.",
        "content": _json(ref("NotReady")),
    }
    model = _get("Tell of one model.", _json(ref("Model")), "404", "503")
    parameters: list[Any] = [{"name": "model", "in": "path", "required": True, "schema": STRING}]
    model["get"]["parameters"] = parameters
    security: list[dict[str, list[str]]] = [{}, {"key": []}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "dynbus", "version": _version()},
        "security": security,
        "paths": {
            **{path: _post(post) for path, post in POSTS.items()},
            "/v1/streams/{request}": _stream(),
            "/v1/models": _get(
                "List the models that can be asked.", _json(ref("ModelList")), "503"
            ),
            "/v1/models/{model}": model,
            "/health": _get("Tell whether the process works.", _json(ref("Health"))),
            "/ready": ready,
            "/metrics": _get("Give metrics to Prometheus.", {"text/plain": {"schema": STRING}}),
            **key_paths(_STATUSES),
            **_RESPONSE_PATHS,
            **_BATCH_PATHS,
        },
        "components": {
            "schemas": {**schemas, **ANSWERS, **KEY_SCHEMAS, **RESPONSE_SCHEMAS, **BATCH_SCHEMAS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


DOCUMENT: Final[dict[str, Any]] = _document()
"""The interface by the OpenAPI specification."""


def document(
    names: Mapping[ModelType, list[str]], *, batches: bool, responses: bool
) -> dict[str, Any]:
    """The interface with the models that can be asked now.

    Args:
        names: by what they are there for.
        batches: whether files and batches are taken.
        responses: whether responses are kept.
    """
    absent = {*(() if batches else _BATCH_PATHS), *(() if responses else _RESPONSE_PATHS)}
    paths = {path: one for path, one in DOCUMENT["paths"].items() if path not in absent}
    schemas = dict(DOCUMENT["components"]["schemas"])
    for post in POSTS.values():
        known = sorted({name for kind in post.model for name in names.get(kind, ())})
        if known:
            name = post.request.__name__
            fields = schemas[name]["properties"]
            model: Schema = one_of(*known)
            if "model" not in schemas[name].get("required", ()):
                model = optional(model)
            schemas[name] = {**schemas[name], "properties": {**fields, "model": model}}
    return {
        **DOCUMENT,
        "paths": paths,
        "components": {**DOCUMENT["components"], "schemas": schemas},
    }


# For people -------------------------------------------------------------------------------------


def _types(schema: Schema) -> Iterator[str]:
    """The types that a field may have, in words."""
    for one in schema.get("anyOf", [schema]):
        if "anyOf" in one:
            yield from _types(one)
        elif one.get("type", "null") != "null":
            yield one["type"]


def _fields(schema: Schema) -> str:
    required = schema.get("required", [])
    rows: list[str] = []
    for name, field in schema["properties"].items():
        kinds = " or ".join(dict.fromkeys(_types(field))) or "any"
        needed = ", needed" if name in required else ""
        rows.append(f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(kinds)}{needed}")
    return f"<table>{''.join(rows)}</table>"


def _page() -> bytes:
    schemas = DOCUMENT["components"]["schemas"]
    parts: list[str] = []
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation['summary'])}</p>")
            content = operation.get("requestBody", {}).get("content", {})
            for media in content.values():
                parts.append(_fields(schemas[media["schema"]["$ref"].rpartition("/")[2]]))
    rows = "".join(f"<tr><td>{status}<td>{html.escape(text)}" for status, text in _STATUSES.items())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'><title>dynbus</title>"
        "<style>body{font:16px/1.5 system-ui;margin:2rem auto;max-width:48rem;padding:0 1rem}"
        "td{padding:.1rem 1rem .1rem 0;vertical-align:top}h2{margin-top:2rem;font-size:1.1rem}"
        "</style><h1>The interface</h1>"
        "<p>For programs: <a href=/openapi.json>/openapi.json</a></p>"
        f"{''.join(parts)}<h2>Errors</h2><table>{rows}</table></html>"
    ).encode()


PAGE: Final = _page()
"""The same for people: no script, and nothing of other hosts."""
