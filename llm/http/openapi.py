"""What the interface is, for programs (`/openapi.json`) and for people (`/docs`)."""

from __future__ import annotations

import html
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import msgspec

from dynbus.llm.openai.embeddings import EmbeddingsAnswer, EmbeddingsRequest, OneEmbedding
from dynbus.llm.openai.requests import ChatRequest, CompletionRequest
from dynbus.llm.openai.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

_STATUSES: Final[Mapping[str, str]] = {
    "400": "The request is not usable.",
    "401": "A key is missing, or not known.",
    "404": "There is no such model.",
    "413": "The body or the request is too large.",
    "422": "A field does not fit.",
    "429": "Too much is asked; `Retry-After` says when to ask again.",
    "499": "The client left.",
    "503": "No engine is there, or the front end stops.",
    "504": "The time is over.",
}


def _version() -> str:
    try:
        return version("dynbus")
    except PackageNotFoundError:
        return "0"


def _responses(content: Mapping[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refused = {
        status: {"description": text, "content": error} for status, text in _STATUSES.items()
    }
    return {"200": {"description": "The answer.", "content": content}, **refused}


def _completion(kind: str, schema: str, summary: str) -> dict[str, Any]:
    content = {
        "application/json": {"schema": {"type": "object", "description": kind}},
        "text/event-stream": {
            "schema": {
                "type": "string",
                "description": f"Events of `{kind}` objects; the last one is [DONE].",
            }
        },
    }
    return {
        "post": {
            "summary": summary,
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": schema}}},
            },
            "responses": _responses(content),
        }
    }


def _whole(summary: str, asked: Mapping[str, Any], answered: Mapping[str, Any]) -> dict[str, Any]:
    """A path that is asked by POST, and whose answer is never a stream."""
    return {
        "post": {
            "summary": summary,
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": asked}},
            },
            "responses": _responses({"application/json": {"schema": answered}}),
        }
    }


def _get(summary: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}}
    return {
        "get": {
            "summary": summary,
            "responses": {"200": {"description": summary, "content": content}},
        }
    }


def _document() -> dict[str, Any]:
    (chat, completion, *others), schemas = msgspec.json.schema_components(
        (
            ChatRequest,
            CompletionRequest,
            EmbeddingsRequest,
            EmbeddingsAnswer,
            OneEmbedding,
            TokenizeRequest,
            Tokenized,
            DetokenizeRequest,
            Detokenized,
        ),
        ref_template="#/components/schemas/{name}",
    )
    embeddings, one, tokens, texts = others[0:2], others[2], others[3:5], others[5:7]
    schemas["EmbeddingsAnswer"]["properties"]["data"]["items"] = one
    schemas["Error"] = {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    name: {"type": ["string", "null"]}
                    for name in ("message", "type", "param", "code", "request_id")
                },
            }
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "dynbus", "version": _version()},
        "paths": {
            "/v1/chat/completions": _completion(
                "chat.completion", chat["$ref"], "Answer a conversation."
            ),
            "/v1/completions": _completion(
                "text_completion", completion["$ref"], "Continue a text."
            ),
            "/v1/embeddings": _whole("Embed texts.", *embeddings),
            "/tokenize": _whole("Give the tokens of a text or a conversation.", *tokens),
            "/detokenize": _whole("Give the text of tokens.", *texts),
            "/v1/models": _get("List the models that can be asked."),
            "/v1/models/{model}": _get("Tell of one model."),
            "/health": _get("Tell whether the process works."),
            "/ready": _get("Tell whether requests are answered: 503 when they are not."),
            "/metrics": _get("Give metrics to Prometheus, as text."),
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _fields(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", [])
    rows: list[str] = []
    for name, field in schema["properties"].items():
        kinds = [one.get("type", "") for one in field.get("anyOf", [field])]
        told = " or ".join(kind for kind in kinds if kind and kind != "null") or "any"
        needed = ", needed" if name in required else ""
        rows.append(f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(told)}{needed}")
    return f"<table>{''.join(rows)}</table>"


def _page() -> bytes:
    schemas = DOCUMENT["components"]["schemas"]
    parts: list[str] = []
    for path, methods in DOCUMENT["paths"].items():
        for method, told in methods.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(told['summary'])}</p>")
            content = told.get("requestBody", {}).get("content", {})
            for media in content.values():
                parts.append(_fields(schemas[media["schema"]["$ref"].rpartition("/")[2]]))
    rows = "".join(f"<tr><td>{status}<td>{html.escape(text)}" for status, text in _STATUSES.items())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'><title>dynbus</title>"
        "<style>body{font:16px/1.5 system-ui;margin:2rem auto;max-width:48rem;padding:0 1rem}"
        "td{padding:.1rem 1rem .1rem 0;vertical-align:top}h2{margin-top:2rem;font-size:1.1rem}"
        "</style><h1>OpenAI's interface</h1>"
        "<p>For programs: <a href=/openapi.json>/openapi.json</a></p>"
        f"{''.join(parts)}<h2>Errors</h2><table>{rows}</table></html>"
    ).encode()


DOCUMENT: Final[dict[str, Any]] = _document()
"""The interface by the OpenAPI specification."""

PAGE: Final = _page()
"""The same for people: no script, and nothing of other hosts."""
