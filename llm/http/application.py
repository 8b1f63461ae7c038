"""The application of a front end: which path is answered by what, and to whom."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from starlette.middleware.cors import CORSMiddleware

from dynbus.bus.errors import DynbusError
from dynbus.llm.models.card import ModelCard
from dynbus.llm.openai.errors import answer_of

from .completions import CompletionsEndpoint, Receive, Scope
from .metrics import CONTENT_TYPE
from .openapi import DOCUMENT, PAGE
from .service import Asker, FrontEnd
from .writer import Headers, Send

logger = logging.getLogger(__name__)

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS: Final = frozenset(("/health", "/ready"))
"""Which orchestrators ask, without a key."""

PAGE_PATHS: Final = frozenset(("/", "/docs", "/openapi.json", "/metrics"))
"""Which people open: the browser asks them for the key, and sends it as a password from then on."""

_DEFAULTS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
)

_HTML: Final = (
    (b"content-type", b"text/html; charset=utf-8"),
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    ),
)


class Response(Exception):
    """An answer that is known at once; raised or returned."""

    def __init__(self, status: int, body: bytes, headers: Headers) -> None:
        super().__init__(status)
        self.status = status
        self.body = body
        self.headers = headers


def json_response(value: Any, status: int = 200, headers: Headers = ()) -> Response:
    """An answer in JSON."""
    return Response(
        status, msgspec.json.encode(value), ((b"content-type", b"application/json"), *headers)
    )


def error_response(error: DynbusError, request_id: str) -> Response:
    """An error as OpenAI's clients expect it."""
    told = answer_of(error, request_id)
    own = [(name.lower().encode(), value.encode("latin-1")) for name, value in told.headers.items()]
    return Response(told.status, told.body, ((b"content-type", b"application/json"), *own))


Page = Callable[[Asker], Awaitable[Response]]
"""What answers a GET."""


class Application:
    """An ASGI application.

    Args:
        pages: more paths that are answered to GET, with a key where there are keys.
    """

    def __init__(self, front_end: FrontEnd, pages: Mapping[str, Page] | None = None) -> None:
        self._front_end = front_end
        self._posts: Mapping[str, Endpoint] = {
            "/v1/chat/completions": CompletionsEndpoint.chat(front_end),
            "/v1/completions": CompletionsEndpoint.text(front_end),
        }
        self._pages: dict[str, Page] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
            "/docs": self._docs,
            "/v1/models": self._models,
            **(pages or {}),
        }
        self._answer: Any = self._route
        origins = front_end.settings.cors_origins
        if origins:
            routed: Any = self._route
            self._answer = CORSMiddleware(
                routed,
                allow_origins=list(origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "traceparent", "retry-after", "x-should-retry"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        front_end = self._front_end
        method, path = scope["method"], scope["path"]
        asker = front_end.asker(scope["headers"])
        try:
            if path not in OPEN_PATHS:
                asker = front_end.authorized(asker)
            endpoint = self._posts.get(path)
            if endpoint is not None and method == "POST":
                scope.setdefault("state", {})["asker"] = asker
                await endpoint(scope, receive, send)
                return
            response = await self._respond(method, path, asker)
        except Response as raised:
            response = raised
        except DynbusError as error:
            response = error_response(error, asker.request_id)
            if _is_for_browsers(path) and response.status == 401:
                ask = (b"www-authenticate", b'Basic realm="dynbus", charset="UTF-8"')
                kept = [one for one in response.headers if one[0] != ask[0]]
                response.headers = [*kept, ask]
        await self._send(response, method, asker, send)

    async def _respond(self, method: str, path: str, asker: Asker) -> Response:
        page = self._pages.get(path)
        if page is None and path.startswith("/v1/models/"):
            return await self._model(path.removeprefix("/v1/models/"))
        if page is None and path not in self._posts:
            raise _refused(404, f"there is no {path[:200]!r} here; see /docs", "not_found")
        if page is None or method not in ("GET", "HEAD"):
            allowed = "POST" if path in self._posts else "GET"
            refused = _refused(405, f"{path} takes {allowed}, not {method}", "method_not_allowed")
            refused.headers = [*refused.headers, (b"allow", allowed.encode())]
            raise refused
        return await page(asker)

    async def _send(self, response: Response, method: str, asker: Asker, send: Send) -> None:
        given = {name for name, _ in response.headers}
        headers = [
            *response.headers,
            *(one for one in _DEFAULTS if one[0] not in given),
            (b"x-request-id", asker.request_id.encode()),
            (b"content-length", b"%d" % len(response.body)),
        ]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        body = b"" if method == "HEAD" else response.body
        await send({"type": "http.response.body", "body": body, "more_body": False})

    # Pages -----------------------------------------------------------------------------------

    async def _health(self, asker: Asker) -> Response:
        """Whether the process works at all."""
        return json_response({"status": "ok"})

    async def _ready(self, asker: Asker) -> Response:
        """Whether requests are taken, and a model is there for them."""
        front_end = self._front_end
        names = front_end.models.names
        if front_end.is_draining:
            return json_response({"status": "unavailable", "reason": "draining"}, 503)
        if not names:
            # Why they cannot be read is in the log, which is not everybody's.
            is_known = not front_end.models.problem
            reason = "no model is served" if is_known else "the models on the bus cannot be read"
            return json_response({"status": "unavailable", "reason": reason}, 503)
        if not front_end.models.is_connected:
            return json_response({"status": "unavailable", "reason": "the bus is away"}, 503)
        # Which models there are is told to those who have a key.
        return json_response({"status": "ok", "models": len(names)})

    async def _models(self, asker: Asker) -> Response:
        return json_response({"object": "list", "data": self._listed()})

    def _listed(self) -> list[dict[str, Any]]:
        cards = {one.card.name: one.card for one in self._front_end.models.served}
        return [_told(cards[name]) for name in sorted(cards)]

    async def _model(self, name: str) -> Response:
        for told in self._listed():
            if told["id"] == name:
                return json_response(told)
        raise self._front_end.models.unknown(name)

    async def _openapi(self, asker: Asker) -> Response:
        return json_response(DOCUMENT)

    async def _docs(self, asker: Asker) -> Response:
        return Response(200, PAGE, _HTML)

    async def _metrics(self, asker: Asker) -> Response:
        front_end = self._front_end
        page = front_end.metrics.page(len(front_end.models.names)).encode()
        page += await asyncio.to_thread(_registered)
        return Response(200, page, ((b"content-type", CONTENT_TYPE.encode()),))


def _is_for_browsers(path: str) -> bool:
    return path in PAGE_PATHS or path.startswith("/page/")


def _registered() -> bytes:
    """What the process shows of other metrics; nothing where nobody has set that up."""
    prometheus: Any = sys.modules.get("prometheus_client")
    return b"" if prometheus is None else prometheus.generate_latest(prometheus.REGISTRY)


def _refused(status: int, message: str, code: str) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return json_response({"error": error}, status)


_started: Final = int(time.time())


def _told(card: ModelCard) -> dict[str, Any]:
    told: dict[str, Any] = {
        "id": card.name,
        "object": "model",
        "created": int(card.created) or _started,
        "owned_by": "dynbus",
    }
    if card.context_length:
        told["max_model_len"] = card.context_length
    return told
