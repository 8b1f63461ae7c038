"""The application of a front end: which path is answered by what, and to whom."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from dynbus import DynbusError, PermissionDenied
from dynbus.llm.batches.asking import APIS as OPENAIS
from dynbus.llm.messages.api import MessagesApi
from dynbus.llm.messages.errors import anthropics_error, message_error
from dynbus.llm.messages.models import model_info, model_list
from dynbus.llm.models.card import ModelCard, ModelType
from dynbus.llm.openai.api import Api
from dynbus.llm.openai.errors import BadRequest, ErrorAnswer, answer_of
from dynbus.llm.responses.store import no_response
from dynbus.llm.responses.stored import check_is_whole, input_page, page_fields
from dynbus.llm.tenants.standing import key_object

from .announcing import AnnounceExchange
from .batches import BatchExchanges, is_for_batches
from .completions import CompletionExchange, ResponsesExchange
from .description import PAGE, document
from .embeddings import EmbeddingsExchange
from .exchange import KNOWN, Exchange, Receive, Scope
from .metrics import CONTENT_TYPE
from .scores import RerankExchange, ScoreExchange
from .shared import RESUMABLE, RESUMABLE_REASON, Caller, Shared
from .streams import RESPONSES, STREAMS, StreamExchange
from .tokens import (
    DetokenizeExchange,
    InputCountExchange,
    MessagesCountExchange,
    TokenizeExchange,
)
from .writer import JSON, Headers, Send, raw_headers

logger = logging.getLogger(__name__)

APIS: Final[Mapping[str, Api]] = {
    **OPENAIS,
    "/v1/messages": MessagesApi(),
}
"""The endpoints that engines with tokens answer, by path."""

EXCHANGES: Final[Mapping[str, Callable[[Shared, str, Caller, Scope, Receive, Send], Exchange]]] = {
    **{path: partial(CompletionExchange, api) for path, api in APIS.items()},
    RESPONSES: ResponsesExchange,
    "/v1/messages/count_tokens": MessagesCountExchange,
    "/v1/responses/input_tokens": InputCountExchange,
    "/v1/sessions/announce": AnnounceExchange,
    "/v1/embeddings": EmbeddingsExchange,
    "/v1/score": ScoreExchange,
    "/score": ScoreExchange,
    "/v1/rerank": RerankExchange,
    "/v2/rerank": RerankExchange,
    "/rerank": RerankExchange,
    "/tokenize": TokenizeExchange,
    "/detokenize": DetokenizeExchange,
}
"""The exchange of each POST, by path."""

ANTHROPICS: Final = "/v1/messages"
"""The beginning of the paths of Anthropic's interface, which has errors of its own."""

KEY: Final = "/v1/key"
"""The path that tells a client of its own key."""

OPEN_PATHS: Final = frozenset(("/health", "/ready"))
"""The paths that orchestrators ask without a key."""

PAGE_PATHS: Final = frozenset(("/", "/docs", "/openapi.json", "/metrics"))
"""The paths that people open: the browser asks them for the key, and sends it as a password from
then on.
"""

EXPOSED: Final = (
    "x-request-id",
    "request-id",
    "traceparent",
    "retry-after",
    "idempotent-replayed",
    "x-should-retry",
    *(
        f"x-ratelimit-{of}-{what}"
        for what in ("requests", "tokens")
        for of in ("limit", "remaining", "reset")
    ),
    RESUMABLE,
    RESUMABLE_REASON,
)
"""Headers of answers that pages of other origins may read."""

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


class Response(NamedTuple):
    """An answer that is known at once."""

    status: int
    body: bytes
    headers: Headers


def json_response(value: Any, status: int = 200, headers: Headers = ()) -> Response:
    """An answer in JSON."""
    return Response(status, msgspec.json.encode(value), (JSON, *headers))


Page = Callable[[Caller], Awaitable[Response]]
"""The function that answers a GET."""


METHODS: Final = ("GET", "POST", "DELETE")
"""That pages of other origins may ask with."""
REMEMBERED_SECONDS: Final = 600
"""For which a browser may keep what it was told before a request."""


class Origins:
    """The origins whose pages a browser lets read answers, as the Fetch standard says.

    Whose pages may ask at all is for `Shared.check_site`.

    Args:
        origins: such as `https://example.com`; `*` is all.
        exposed: headers of answers that pages may read.
    """

    def __init__(self, origins: Sequence[str], exposed: Sequence[str]) -> None:
        self._origins = frozenset(origins)
        self._exposed = ", ".join(exposed)

    def preflight(self, headers: Mapping[str, str]) -> Response:
        """The answer to a browser that asks what it may ask.

        Args:
            headers: of the request, their names in lower case.
        """
        allowed = self._allowed(headers["origin"])
        asked = headers["access-control-request-method"]
        answered = {
            "vary": "Origin, Access-Control-Request-Headers",
            "access-control-allow-methods": ", ".join(METHODS),
            "access-control-max-age": str(REMEMBERED_SECONDS),
        }
        if allowed:
            answered["access-control-allow-origin"] = allowed
        if wanted := headers.get("access-control-request-headers"):
            answered["access-control-allow-headers"] = wanted
        refused = [] if allowed else ["origin"]
        if asked not in METHODS:
            refused.append("method")
        if refused:
            text = f"Disallowed CORS {', '.join(refused)}"
            return Response(400, text.encode(), raw_headers(answered))
        return Response(200, b"OK", raw_headers(answered))

    def sending(self, headers: Mapping[str, str], send: Send) -> Send:
        """A `send` that tells the browser in the headers of an answer who may read it."""
        added = {} if "*" in self._origins else {"vary": "Origin"}
        origin = headers.get("origin")
        allowed = self._allowed(origin) if origin is not None else ""
        if allowed:
            added["access-control-allow-origin"] = allowed
            added["access-control-expose-headers"] = self._exposed
        more = raw_headers(added)

        def send_with_headers(message: MutableMapping[str, Any]) -> Coroutine[Any, Any, None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *more]
            return send(message)

        return send_with_headers

    def _allowed(self, origin: str) -> str:
        """The header value that allows an origin; empty where it is not allowed."""
        if "*" in self._origins:
            return "*"
        return origin if origin in self._origins else ""


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    """True if a browser asks which requests it may make."""
    names = ("origin", "access-control-request-method")
    return method == "OPTIONS" and all(name in headers for name in names)


class Application:
    """An ASGI application.

    Args:
        pages: more paths that are answered to GET, with a key where there are keys.
        batches: what answers requests for files and batches; None where nobody does.
    """

    def __init__(
        self, shared: Shared, pages: Mapping[str, Page], batches: BatchExchanges | None = None
    ) -> None:
        self._shared = shared
        self._batches = batches
        self._pages: dict[str, Page] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
            "/docs": self._docs,
            "/v1/models": self._models,
            KEY: self._key,
            **pages,
        }
        origins = shared.settings.cors_origins
        self._origins = Origins(origins, EXPOSED) if origins else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            try:
                await self._route(scope, receive, send)
            finally:
                # They hold the connection's state of this request, which holds the scope: only a
                # collection would find what holds each other.
                scope.get("extensions", {}).clear()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        shared = self._shared
        method, path = scope["method"], scope["path"]
        caller = shared.caller(scope["headers"])
        if self._origins is not None:
            if is_preflight(method, caller.headers):
                response = self._origins.preflight(caller.headers)
                await self._send(response, method, caller, send)
                return
            send = self._origins.sending(caller.headers, send)
        try:
            _check_hosts(scope)
            if path not in OPEN_PATHS:
                shared.check_site(method, caller)
                caller = await shared.authorized(caller)
                _tell_known(scope)
            make_exchange = EXCHANGES.get(path)
            if path.startswith(STREAMS) and method == "GET":
                stream = path.removeprefix(STREAMS)
                reading = StreamExchange(APIS, stream, shared, caller, scope, receive, send)
                await reading.run()
                return
            if make_exchange is not None and method == "POST":
                await make_exchange(shared, path, caller, scope, receive, send).run()
                return
            if self._batches is not None and method in self._batches.methods(path):
                answer = await self._batches.answer(path, caller, scope, receive, send)
                if answer is None:
                    return
                response = json_response(answer)
            elif path.startswith(f"{RESPONSES}/"):
                response = await self._respond_of_response(method, path, caller, scope)
            else:
                response = await self._respond(method, path, caller)
        except DynbusError as error:
            tell = message_error if path.startswith(ANTHROPICS) else answer_of
            refusal = tell(error, caller.request_id)
            response = _error(refusal, in_browser=_is_for_browsers(path))
        await self._send(response, method, caller, send)

    async def _respond(self, method: str, path: str, caller: Caller) -> Response:
        page = self._pages.get(path)
        if is_for_batches(path):
            return self._refuse_for_batches(method, path, caller)
        if page is None and path.startswith("/v1/models/"):
            page = partial(self._model, path.removeprefix("/v1/models/"))
        if page is None and path not in EXCHANGES and not path.startswith(STREAMS):
            why = f"there is no {path[:200]!r} here; see /docs"
            return _refused(path, 404, why, "not_found", caller)
        if page is None or method not in ("GET", "HEAD"):
            allowed = "POST" if path in EXCHANGES else "GET"
            why = f"{path} takes {allowed}, not {method}"
            headers = [(b"allow", allowed.encode())]
            return _refused(path, 405, why, "method_not_allowed", caller, headers)
        return await page(caller)

    async def _respond_of_response(
        self, method: str, path: str, caller: Caller, scope: Scope
    ) -> Response:
        """The answer to a request for a response that is kept."""
        responses = self._shared.responses
        if responses is None:
            why = "responses are not kept here: it was started with --forget-responses"
            return _refused(path, 404, why, "not_found", caller)
        name, _, part = path.removeprefix(f"{RESPONSES}/").partition("/")
        methods = {"": ("GET", "DELETE"), "input_items": ("GET",)}.get(part, ())
        if not methods:
            why = f"there is no {path[:200]!r} here; see /docs"
            return _refused(path, 404, why, "not_found", caller)
        if method not in methods:
            allowed = ", ".join(methods)
            why = f"{path[:200]} takes {allowed}, not {method}"
            headers = [(b"allow", allowed.encode())]
            return _refused(path, 405, why, "method_not_allowed", caller, headers)
        if method == "DELETE":
            await responses.delete(caller.tenant, name)
            return json_response({"id": name, "object": "response", "deleted": True})
        stored = await responses.get(caller.tenant, name)
        if stored is None:
            raise no_response(name)
        if not part:
            check_is_whole(scope["query_string"])
            return json_response(stored.response)
        return json_response(input_page(stored, **page_fields(scope["query_string"])))

    def _refuse_for_batches(self, method: str, path: str, caller: Caller) -> Response:
        """The answer to a request for files or batches that nothing answers."""
        if self._batches is None:
            why = "batches are not done here: start the front end with --batches"
            return _refused(path, 404, why, "not_found", caller)
        allowed = ", ".join(self._batches.methods(path))
        if not allowed:
            why = f"there is no {path[:200]!r} here"
            return _refused(path, 404, why, "not_found", caller)
        why = f"{path[:200]} takes {allowed}, not {method}"
        headers = [(b"allow", allowed.encode())]
        return _refused(path, 405, why, "method_not_allowed", caller, headers)

    async def _send(self, response: Response, method: str, caller: Caller, send: Send) -> None:
        given = {name for name, _ in response.headers}
        headers = [
            *response.headers,
            *(one for one in _DEFAULTS if one[0] not in given),
            *caller.id_headers,
            (b"content-length", b"%d" % len(response.body)),
        ]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        body = b"" if method == "HEAD" else response.body
        await send({"type": "http.response.body", "body": body, "more_body": False})

    # Pages -----------------------------------------------------------------------------------

    async def _health(self, caller: Caller) -> Response:
        """Answer 200 as long as the process works at all."""
        return json_response({"status": "ok"})

    async def _ready(self, caller: Caller) -> Response:
        """Answer 200 if requests are accepted and there is a model for them, 503 if not."""
        shared = self._shared
        names = shared.models.names
        if shared.is_draining:
            return json_response({"status": "unavailable", "reason": "draining"}, 503)
        if not names:
            # Why they cannot be read is in the log, which is not everybody's.
            is_known = not shared.models.problem
            reason = "no model is served" if is_known else "the models on the bus cannot be read"
            return json_response({"status": "unavailable", "reason": reason}, 503)
        away = shared.models.out_of_reach
        if away:
            return json_response({"status": "unavailable", "reason": away}, 503)
        # Which models there are is told to those who have a key.
        status: dict[str, Any] = {"status": "ok", "models": len(names)}
        if shared.tenants is not None and shared.tenants.problem:
            # Where they are and what is wrong with them is in the log.
            status["warning"] = "keys cannot be read: those from before stay in force"
        return json_response(status)

    async def _models(self, caller: Caller) -> Response:
        cards = self._cards()
        if caller.is_anthropics:
            known = [cards[name] for name in sorted(cards) if self._may_ask(caller, name)]
            return json_response(model_list(known))
        entries = {name: _entry(card) for name, card in cards.items()}
        for name in self._shared.models.without_engine:
            entries[name] = _entry_without_engine(name)
        data = [entries[name] for name in sorted(entries) if self._may_ask(caller, name)]
        return json_response({"object": "list", "data": data})

    async def _model(self, name: str, caller: Caller) -> Response:
        card = self._cards().get(name)
        tellable = self._shared.models_of(caller)
        if not self._may_ask(caller, name):
            raise self._shared.models.unknown(name, tellable)
        if card is None and name in self._shared.models.without_engine:
            return json_response(_entry_without_engine(name))
        if card is None:
            raise self._shared.models.unknown(name, tellable)
        return json_response(model_info(card) if caller.is_anthropics else _entry(card))

    def _may_ask(self, caller: Caller, name: str) -> bool:
        """True if the tenant of a request may ask a model."""
        models = self._shared.models_of(caller)
        return models is None or name in models

    def _cards(self) -> dict[str, ModelCard]:
        """Those of the models that can be asked, by name."""
        return {one.card.name: one.card for one in self._shared.models.served}

    async def _key(self, caller: Caller) -> Response:
        tenants = self._shared.tenants
        if tenants is None:
            why = "there are no keys here: every client may ask for everything"
            return _refused(KEY, 404, why, "not_found", caller)
        limits = tenants.limits_of(caller.tenant)
        return json_response(await key_object(tenants.counts, caller.holder, limits))

    async def _openapi(self, caller: Caller) -> Response:
        names: dict[ModelType, list[str]] = {}
        for model in self._shared.models.served:
            for kind in model.answers if self._may_ask(caller, model.card.name) else ():
                names.setdefault(kind, []).append(model.card.name)
        has_batches, keeps = self._batches is not None, self._shared.responses is not None
        return json_response(document(names, batches=has_batches, responses=keeps))

    async def _docs(self, caller: Caller) -> Response:
        return Response(200, PAGE, _HTML)

    async def _metrics(self, caller: Caller) -> Response:
        if not caller.holder.is_operator:
            raise PermissionDenied(
                "/metrics tells of all tenants: ask with a key of an operator, whose line in the "
                "file of keys ends with `role: operator`, or which `dynbus keys add --operator` "
                "has made",
                started=False,
            )
        shared = self._shared
        page = shared.metrics.page(len(shared.models.names), shared.resumable.counts).encode()
        page += await asyncio.to_thread(_registered)
        return Response(200, page, ((b"content-type", CONTENT_TYPE.encode()),))


def _check_hosts(scope: Scope) -> None:
    """Refuse a request for more than one host, which a proxy before may have taken for another."""
    count = sum(name == b"host" for name, _ in scope["headers"])
    if count > 1 or (not count and scope["http_version"] == "1.1"):
        raise BadRequest(f"the request has {count} headers Host: send one")


def _tell_known(scope: Scope) -> None:
    """Tell the server, if it wants to know, that its client is nobody's stranger."""
    extensions: Mapping[str, Any] = scope.get("extensions") or {}
    known: Callable[[], object] | None = extensions.get(KNOWN)
    if known is not None:
        known()


def _is_for_browsers(path: str) -> bool:
    return path in PAGE_PATHS or path.startswith("/page/")


def _registered() -> bytes:
    """The other metrics of the process; empty where nobody has set them up."""
    prometheus: Any = sys.modules.get("prometheus_client")
    return b"" if prometheus is None else prometheus.generate_latest(prometheus.REGISTRY)


def _error(answer: ErrorAnswer, *, in_browser: bool) -> Response:
    """An error as it is answered; a browser asks for the key."""
    headers = {**answer.headers}
    if in_browser and answer.status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="dynbus", charset="UTF-8"'
    return Response(answer.status, answer.body, (JSON, *raw_headers(headers)))


def _refused(
    path: str, status: int, message: str, code: str, caller: Caller, headers: Headers = ()
) -> Response:
    body: dict[str, Any]
    if path.startswith(ANTHROPICS):
        body = anthropics_error(status, message, caller.request_id)
    else:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = {"error": {**error, "request_id": caller.request_id}}
    return json_response(body, status, headers)


_started: Final = int(time.time())


def _entry_without_engine(name: str) -> dict[str, Any]:
    """A model of which no more is known while it has no engine than that it may come."""
    return {"id": name, "object": "model", "created": _started, "owned_by": "dynbus"}


def _entry(card: ModelCard) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": card.name,
        "object": "model",
        "created": int(card.created) or _started,
        "owned_by": "dynbus",
    }
    if card.base_model:
        entry["parent"] = card.base_model
    if card.context_length:
        entry["max_model_len"] = card.context_length
    return entry
